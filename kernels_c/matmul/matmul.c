/*
 * matmul on the CPU; matmul.h has its formulas.
 *
 * Threads compute tiles of the output. For each block of DEPTH products, a thread converts its parts of x and w to
 * float, w in panels of two vectors of columns. multiply() adds the block to ROWS rows and one panel of sums, which
 * stay in registers: each load of w serves ROWS rows, and each load of x serves a panel. A panel of w stays in the L1
 * cache, and the other parts in the L2 cache. Conversions follow any strides, and a transposed w is turned in squares.
 *
 * An element's sum has an order that depends only on K. Therefore its bits are the same for any number of threads, any
 * strides, and any other rows and columns.
 *
 * With AVX-512, one thread multiplies 512 x 4096 by 4096 x 4096 in 1.2 times the time of torch.mm in float32, and 1.4
 * times its time in float16. With one row, converting w takes most of the time. On CPUs with matrix instructions (AMX),
 * torch.mm in bfloat16 is up to 7x faster. `opjit bench matmul --against torch.compile` compares them.
 */
#include "matmul.h"
#include "opjit_convert.h"

#define PAIR(i_) i_, LANES + (i_)
#if defined(__AVX512F__)
#define LANES 16 /* floats in a vector */
#define ROWS 12  /* of a register tile: two vectors of sums each, of 32 registers */
#define INTERLEAVED {PAIR(0), PAIR(1), PAIR(2), PAIR(3), PAIR(4), PAIR(5), PAIR(6), PAIR(7)}
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6 /* of 16 registers */
#define INTERLEAVED {PAIR(0), PAIR(1), PAIR(2), PAIR(3)}
#else
#define LANES 4
#define ROWS 6
#define INTERLEAVED {PAIR(0), PAIR(1)}
#endif
#define PANEL (2 * LANES) /* columns */

#define DEPTH 256          /* products of a block */
#define TILE_ROWS 240      /* at most; a multiple of ROWS */
#define TILE_COLUMNS 128   /* of z, at most; a multiple of 2 PANEL */
#define JOBS 128           /* at most; a job is some tiles in turn */
#define JOB_WORK (1 << 20) /* multiplications of a job, at least: 20 us */

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* at any address */
typedef int32_t words __attribute__((vector_size(4 * LANES)));

/* The memory of a thread. */
typedef struct space {
    float x[TILE_ROWS * DEPTH];
    float w[TILE_COLUMNS * DEPTH];        /* panels, each with its rows one after the other */
    float turned[PANEL * DEPTH];          /* the columns of a panel, one after the other */
    float sums[TILE_ROWS * TILE_COLUMNS]; /* z; the second half of a row is for the second half of z */
    float bias[TILE_COLUMNS], residual[TILE_COLUMNS];
} space;

typedef struct product {
    const matmul_call *call;
    int64_t tile_rows, tile_columns; /* of out */
    int64_t tiles_down, tiles, jobs;
    space *spaces; /* one for each job */
} product;

/* The part of out that is a tile. */
typedef struct tile {
    int64_t row, rows, column, columns;
} tile;

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t parts_of(int64_t size, int64_t part)
{
    return (size + part - 1) / part;
}

/* ---------------------------------------------------------------------------------------------- */
/* Packing                                                                                        */

/* Convert n elements that are `stride` elements apart, from the element at (row, column). */
static void load(const opjit_tensor *t, int64_t row, int64_t column, int64_t n, int64_t stride, float *to)
{
    const int64_t at = row * t->strides[0] + column * t->strides[1];
    opjit_convert(n, (const uint16_t *)t->data + at, t->dtype, stride, to, OPJIT_FLOAT32);
}

/*
 * Transpose a square of LANES rows. Interleaving the first half of the rows with the second half rotates the bits of
 * an element's index by one place, and a transpose rotates them by half.
 */
static void turn(const float *from, float *to)
{
    const words low = INTERLEAVED, high = low + LANES / 2;
    floats rows[LANES], next[LANES];
    for (int i = 0; i < LANES; i++)
        rows[i] = *(const floats *)(from + i * DEPTH);
    for (int round = 1; round < LANES; round *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
        }
        memcpy(rows, next, sizeof rows);
    }
    for (int i = 0; i < LANES; i++)
        *(floats *)(to + i * PANEL) = rows[i];
}

/* Panels of w: `depth` rows from k on, and `count` columns, filled up with zeros. */
static void pack_rows(const opjit_tensor *w, int64_t k, int64_t depth, int64_t column, int64_t count, float *to)
{
    float row[TILE_COLUMNS] = {0};
    for (int64_t i = 0; i < depth; i++) {
        load(w, k + i, column, count, w->strides[1], row);
        for (int64_t panel = 0; panel < count; panel += PANEL)
            memcpy(to + panel * DEPTH + i * PANEL, row + panel, PANEL * sizeof *row);
    }
}

/* The same for a transposed w: its columns are read one after the other. */
static void pack_columns(const opjit_tensor *w, int64_t k, int64_t depth, int64_t column, int64_t count, float *turned,
                         float *to)
{
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = i % PANEL, panel = i - at;
        load(w, k, column + i, depth, w->strides[0], turned + at * DEPTH);
        if (at < PANEL - 1 && i < count - 1)
            continue;
        memset(turned + (at + 1) * DEPTH, 0, (size_t)((PANEL - 1 - at) * DEPTH) * sizeof *turned);
        for (int64_t j = 0; j < depth; j += LANES) /* the last rows may be more than `depth`, and are not used */
            for (int64_t half = 0; half < PANEL; half += LANES)
                turn(turned + half * DEPTH + j, to + panel * DEPTH + j * PANEL + half);
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* Products                                                                                       */

/* Add the products of some rows of x and a panel of w to the sums. */
OPJIT_INLINE void multiply(const int rows, int64_t depth, const float *x, const float *w, float *sums)
{
    floats sum[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            sum[r][half] = *(const floats *)(sums + r * TILE_COLUMNS + half * LANES);
    for (int64_t k = 0; k < depth; k++) {
        const floats left = *(const floats *)(w + k * PANEL), right = *(const floats *)(w + k * PANEL + LANES);
        for (int r = 0; r < rows; r++) {
            sum[r][0] += x[r * DEPTH + k] * left;
            sum[r][1] += x[r * DEPTH + k] * right;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            *(floats *)(sums + r * TILE_COLUMNS + half * LANES) = sum[r][half];
}

/* The same for any number of rows. The compiler keeps the sums in registers only for a constant number. */
static void multiply_rows(int64_t rows, int64_t depth, const float *x, const float *w, float *sums)
{
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        multiply(ROWS, depth, x + r * DEPTH, w, sums + r * TILE_COLUMNS);
    for (; r + 4 <= rows; r += 4)
        multiply(4, depth, x + r * DEPTH, w, sums + r * TILE_COLUMNS);
    for (; r < rows; r++)
        multiply(1, depth, x + r * DEPTH, w, sums + r * TILE_COLUMNS);
}

/* Add the products of a block of the depth to all sums of a tile. */
static void multiply_block(const matmul_call *c, const tile *t, int64_t k, space *s)
{
    const int64_t depth = least(DEPTH, c->depth - k), halves = c->epilogue == MATMUL_SILU_MULTIPLY ? 2 : 1;
    for (int64_t r = 0; r < t->rows; r++)
        load(c->x, t->row + r, k, depth, c->x->strides[1], s->x + r * DEPTH);
    for (int64_t half = 0; half < halves; half++) {
        const int64_t first = half * TILE_COLUMNS / 2, column = half * c->columns + t->column;
        float *w = s->w + first * DEPTH;
        if (c->w->strides[1] <= c->w->strides[0])
            pack_rows(c->w, k, depth, column, t->columns, w);
        else
            pack_columns(c->w, k, depth, column, t->columns, s->turned, w);
        for (int64_t i = 0; i < t->columns; i += PANEL)
            multiply_rows(t->rows, depth, s->x, w + i * DEPTH, s->sums + first + i);
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* Tiles                                                                                          */

/* Compute a row of out from z without the bias. */
static void finish_row(const matmul_call *c, const tile *t, int64_t row, space *s, float *z)
{
    const bool halves = c->epilogue == MATMUL_SILU_MULTIPLY;
    float *second = z + TILE_COLUMNS / 2;
    if (c->bias)
        for (int64_t i = 0; i < TILE_COLUMNS; i++)
            z[i] += s->bias[i];
    for (int64_t i = 0; i < t->columns; i++)
        z[i] = halves ? matmul_silu(z[i]) * second[i] : matmul_activate(z[i], c->epilogue);
    if (c->residual) {
        load(c->residual, row, t->column, t->columns, c->residual->strides[1], s->residual);
        for (int64_t i = 0; i < t->columns; i++)
            z[i] += s->residual[i];
    }
    uint16_t *to = (uint16_t *)c->out->data + row * c->columns + t->column;
    opjit_convert(t->columns, z, OPJIT_FLOAT32, 1, to, c->out->dtype);
}

static void compute_tile(const matmul_call *c, const tile *t, space *s)
{
    memset(s->sums, 0, (size_t)(t->rows * TILE_COLUMNS) * sizeof *s->sums);
    for (int64_t k = 0; k < c->depth; k += DEPTH)
        multiply_block(c, t, k, s);
    if (c->bias) {
        const int64_t stride = c->bias->strides[0];
        const uint16_t *bias = (const uint16_t *)c->bias->data + t->column * stride;
        memset(s->bias, 0, sizeof s->bias);
        opjit_convert(t->columns, bias, c->bias->dtype, stride, s->bias, OPJIT_FLOAT32);
        if (c->epilogue == MATMUL_SILU_MULTIPLY)
            opjit_convert(t->columns, bias + c->columns * stride, c->bias->dtype, stride, s->bias + TILE_COLUMNS / 2,
                          OPJIT_FLOAT32);
    }
    for (int64_t r = 0; r < t->rows; r++)
        finish_row(c, t, t->row + r, s, s->sums + r * TILE_COLUMNS);
}

/* Each thread gets some adjacent jobs, and uses the memory of the first. */
static opjit_status run_jobs(int64_t begin, int64_t end, void *context)
{
    const product *p = context;
    const matmul_call *c = p->call;
    for (int64_t i = begin * p->tiles / p->jobs; i < end * p->tiles / p->jobs; i++) {
        tile t = {i % p->tiles_down * p->tile_rows, 0, i / p->tiles_down * p->tile_columns, 0};
        t.rows = least(p->tile_rows, c->rows - t.row);
        t.columns = least(p->tile_columns, c->columns - t.column);
        compute_tile(c, &t, p->spaces + begin);
    }
    return OPJIT_OK;
}

opjit_status matmul_cpu(const opjit_tensor *x, const opjit_tensor *w, const opjit_tensor *bias,
                        const opjit_tensor *residual, const char *epilogue, opjit_tensor *out)
{
    matmul_call call = {x, w, bias, residual, out, 0, 0, 0, MATMUL_NONE};
    OPJIT_TRY(matmul_start(&call, epilogue));
    if (out->numel == 0)
        return OPJIT_OK;
    product p = {&call, 0, 0, 0, 0, 0, NULL};
    const int64_t rows = parts_of(call.rows, parts_of(call.rows, TILE_ROWS)); /* tiles of about the same height */
    p.tile_rows = parts_of(rows, ROWS) * ROWS;
    p.tile_columns = call.epilogue == MATMUL_SILU_MULTIPLY ? TILE_COLUMNS / 2 : TILE_COLUMNS;
    p.tiles_down = parts_of(call.rows, p.tile_rows);
    p.tiles = p.tiles_down * parts_of(call.columns, p.tile_columns);
    const int64_t work = p.tile_rows * TILE_COLUMNS * (call.depth + 1);
    p.jobs = least(JOBS, parts_of(p.tiles, 1 + JOB_WORK / work));
    OPJIT_SCRATCH(p.spaces, p.jobs, x);
    return opjit_parallel_for(0, p.jobs, 1, run_jobs, &p);
}
