/*
 * The part of lltm.c that depends on the type of the elements; included once for each type, with REAL, WORD (an unsigned
 * integer of the same size), NAME(name), and the numbers of the exponential function defined.
 *
 * Contents: functions of a vector; tiles of matrix products; forward; backward
 */

#define LANES ((int64_t)(VECTOR / sizeof(REAL)))
#define WIDTH (VECTORS * LANES) /* of a tile */
#define V NAME(vector)
#define W NAME(words)
#define V_AT NAME(vector_at)
#define QUAD NAME(quad)
#define QUAD_AT NAME(quad_at)
#define MATRIX NAME(matrix)

typedef REAL V __attribute__((vector_size(VECTOR), may_alias));
typedef WORD W __attribute__((vector_size(VECTOR), may_alias));
typedef REAL QUAD __attribute__((vector_size(4 * sizeof(REAL)), may_alias));
typedef WORD NAME(indices) __attribute__((vector_size(4 * sizeof(REAL))));
typedef V V_AT __attribute__((aligned(sizeof(REAL)))); /* in memory, at any element */
typedef QUAD QUAD_AT __attribute__((aligned(sizeof(REAL))));

/* Elements in rows and columns, some number of elements apart. */
typedef struct MATRIX {
    const REAL *data;
    int64_t row, column;
} MATRIX;

static MATRIX NAME(view)(const opjit_tensor *t)
{
    return t ? (MATRIX){(const REAL *)t->data, t->strides[0], t->strides[1]} : (MATRIX){NULL, 0, 0};
}

/* Up to LANES elements of a row, from the n-th on; 0 behind them and where there is no matrix. */
static APART V NAME(gather)(MATRIX m, int64_t row, int64_t n, int64_t count)
{
    V v = {0};
    if (m.data && m.column == 0 && count >= LANES) /* a gradient from sum() */
        return v + m.data[row * m.row];
    for (int64_t i = 0; m.data && i < count && i < LANES; i++)
        v[i] = m.data[row * m.row + (n + i) * m.column];
    return v;
}

static ALWAYS_INLINE V NAME(load)(MATRIX m, int64_t row, int64_t n, int64_t count)
{
    if (m.column == 1 && count >= LANES)
        return *(const V_AT *)(m.data + row * m.row + n);
    return NAME(gather)(m, row, n, count);
}

static ALWAYS_INLINE void NAME(store)(REAL *to, V v, int64_t count)
{
    if (count >= LANES)
        *(V_AT *)to = v;
    else
        memcpy(to, &v, (size_t)count * sizeof *to);
}

static ALWAYS_INLINE V NAME(select)(W where, V yes, V no)
{
    return (V)((where & (W)yes) | (~where & (W)no));
}

#ifdef OPJIT_OP_lltm_forward

/* ---------------------------------------------------------------------------------------------- */
/* Functions of a vector. The errors are in units of the last place, as tests/test_lltm.py holds them. */

/*
 * exp(x) is (1 + p) 2^n, with p = expm1(x - n log 2); x is between EXP_LOWEST and EXP_HIGHEST. Returns p and, through
 * `scale`, 2^(n - less): infinite where the result would be.
 */
static ALWAYS_INLINE V NAME(exp_parts)(V x, int less, V *scale)
{
    static const REAL c[] = EXP_POLYNOMIAL; /* of (expm1(r) - r) / r^2 */
    const int degree = (int)(sizeof c / sizeof *c) - 1;
    V shifted = x * (REAL)1.4426950408889634 + EXP_MAGIC, n = shifted - EXP_MAGIC; /* rounded to an integer */
    V r = x - n * EXP_LOG2_HIGH - n * EXP_LOG2_LOW, q = r * c[degree] + c[degree - 1];
#pragma GCC unroll 16
    for (int i = degree - 2; i >= 0; i--)
        q = q * r + c[i];
    *scale = (V)(((W)shifted - (W)((V){0} + EXP_MAGIC) + (WORD)(EXP_BIAS - less)) << EXP_DIGITS);
    return r + r * r * q;
}

/* exp(x) - 1 for x <= 0; what it gives for other numbers means nothing. 1.5 units */
static ALWAYS_INLINE V NAME(expm1)(V x)
{
    V scale, p = NAME(exp_parts)(NAME(select)((W)(x < EXP_LOWEST), (V){0} + EXP_LOWEST, x), 0, &scale);
    return scale * p + (scale - 1);
}

/* 2.5 units, where the result is not subnormal */
static ALWAYS_INLINE V NAME(sigmoid)(V x)
{
    V scale, up = -x;
    up = NAME(select)((W)(up < EXP_LOWEST), (V){0} + EXP_LOWEST, up);
    up = NAME(select)((W)(up > EXP_HIGHEST), (V){0} + EXP_HIGHEST, up);
    V p = NAME(exp_parts)(up, 1, &scale); /* half of exp(-x): all of it would be infinite too early */
    return (REAL)0.5 / ((1 + p) * scale + (REAL)0.5);
}

/* 3 units */
static ALWAYS_INLINE V NAME(tanh)(V x)
{
    W sign = (W){0} + ((WORD)1 << (8 * sizeof(REAL) - 1));
    V m = NAME(expm1)((V)((W)x | sign) * 2);
    return (V)(((W)(m / (-2 - m)) & ~sign) | ((W)x & sign)); /* -2 - m is negative, also for a zero */
}

static ALWAYS_INLINE V NAME(elu)(V x)
{
    return NAME(select)((W)(x > 0), x, NAME(expm1)(x));
}

#endif

/* ---------------------------------------------------------------------------------------------- */
/* Tiles of matrix products                                                                       */

/*
 * c = a b, of any depth but 0. Row r of a begins at a + r * row and goes on in steps of `step`; the rows of b and c are side by side
 * elements, WIDTH of them. Products are added in order, BLOCK at a time.
 */
typedef struct NAME(product) {
    const REAL *a, *b;
    REAL *c;
    int64_t row, step, b_row, c_row;
    int64_t rows, depth;
} NAME(product);

/* A row's share of a tile: its sums, one more product for each, and what comes of a BLOCK. */
#if VECTORS == 1
#define SUMS(r_) V s##r_ = {0};
#define ADD(r_) s##r_ += x * A_ROW(r_);
#define MORE(r_) s##r_ += C_ROW(r_)[0];
#define PUT(r_) C_ROW(r_)[0] = s##r_;
#else
#define SUMS(r_) V s##r_ = {0}, t##r_ = {0};
#define ADD(r_) s##r_ += x * A_ROW(r_), t##r_ += y * A_ROW(r_);
#define MORE(r_) s##r_ += C_ROW(r_)[0], t##r_ += C_ROW(r_)[1];
#define PUT(r_) C_ROW(r_)[0] = s##r_, C_ROW(r_)[1] = t##r_;
#endif
#define A_ROW(r_) ((r_) < 4 ? a : e)[(r_) % 4 * row] /* two pointers and few offsets fit into the registers */
#define C_ROW(r_) ((V_AT *)(c + (r_)*p->c_row))
#define ROWS_1(do_) do_(0)
#define ROWS_4(do_) do_(0) do_(1) do_(2) do_(3)
#define ROWS_8(do_) ROWS_4(do_) do_(4) do_(5) do_(6) do_(7)

/* Some rows of c, in registers. Spelled out, it needs no loop to be unrolled, which would take the compiler longer. */
#define TILE(name_, rows_) \
    static APART void NAME(name_)(const NAME(product) * p, int64_t first) \
    { \
        const int64_t row = p->row, step = p->step, b_row = p->b_row; \
        const REAL *a = p->a + first * row, *e OPJIT_UNUSED = a + 4 * row, *b = p->b; \
        REAL *c = p->c + first * p->c_row; \
        bool started = false; \
        for (int64_t left = p->depth; left > 0; left -= BLOCK, started = true) { \
            rows_(SUMS) \
            for (int64_t n = left < BLOCK ? left : BLOCK; n > 0; n--, a += step, e += step, b += b_row) { \
                V x = ((const V_AT *)b)[0]; \
                V y OPJIT_UNUSED = ((const V_AT *)b)[VECTORS - 1]; \
                rows_(ADD) \
            } \
            if (started) { \
                rows_(MORE) \
            } \
            rows_(PUT) \
        } \
    }

TILE(row, ROWS_1)
#if ROWS == 8
TILE(rows, ROWS_8)
#else
TILE(rows, ROWS_4)
#endif

static void NAME(multiply)(const NAME(product) * p)
{
    int64_t r = 0;
    for (; r + ROWS <= p->rows; r += ROWS)
        NAME(rows)(p, r);
    for (; r < p->rows; r++)
        NAME(row)(p, r);
}

#ifdef OPJIT_OP_lltm_forward

/* ---------------------------------------------------------------------------------------------- */
/* Forward                                                                                        */

/* to[column][row] = from[row][column] + added[row]; `added` is NULL or has side by side elements. */
static APART void NAME(transpose)(MATRIX from, int64_t rows, int64_t columns, const REAL *added, REAL *to, int64_t to_row)
{
    const int64_t four_rows = from.column == 1 ? rows / 4 * 4 : 0, four_columns = columns / 4 * 4;
    for (int64_t r = 0; r < four_rows; r += 4) {
        const QUAD plus = added ? *(const QUAD_AT *)(added + r) : (QUAD){0};
        const REAL *at = from.data + r * from.row;
        for (int64_t c = 0; c < four_columns; c += 4, at += 4) {
            REAL *out = to + c * to_row + r;
            QUAD m0 = *(const QUAD_AT *)at, m1 = *(const QUAD_AT *)(at + from.row);
            QUAD m2 = *(const QUAD_AT *)(at + 2 * from.row), m3 = *(const QUAD_AT *)(at + 3 * from.row);
            QUAD a = SHUFFLE(m0, m1, 0, 4, 1, 5), b = SHUFFLE(m2, m3, 0, 4, 1, 5);
            QUAD c0 = SHUFFLE(m0, m1, 2, 6, 3, 7), d = SHUFFLE(m2, m3, 2, 6, 3, 7);
            *(QUAD_AT *)out = SHUFFLE(a, b, 0, 1, 4, 5) + plus;
            *(QUAD_AT *)(out + to_row) = SHUFFLE(a, b, 2, 3, 6, 7) + plus;
            *(QUAD_AT *)(out + 2 * to_row) = SHUFFLE(c0, d, 0, 1, 4, 5) + plus;
            *(QUAD_AT *)(out + 3 * to_row) = SHUFFLE(c0, d, 2, 3, 6, 7) + plus;
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = r < four_rows ? four_columns : 0; c < columns; c++)
            to[c * to_row + r] = from.data[r * from.row + c * from.column] + (added ? added[r] : 0);
}

/*
 * The rows of the product are rows of the weights, and its columns are rows of the batch: [old_h, x] transposed, in
 * panels. So neither the weights nor the concatenation is copied. Few rows of the batch that fill no panel go without.
 */
typedef struct NAME(forward) {
    lltm_sizes n;
    int64_t packed; /* rows of the batch that are in panels */
    MATRIX weights, input, old_h, old_cell;
    const REAL *bias;
    REAL *panels, *gates, *new_h, *new_cell;
} NAME(forward);

/* [old_h, x]^T, in panels, filled up with zeros. */
static void NAME(pack)(const NAME(forward) * f)
{
    const int64_t depth = f->n.state + f->n.features;
    for (int64_t b = 0; b < f->packed; b += WIDTH) {
        REAL *panel = f->panels + b * depth, *inputs = panel + f->n.state * WIDTH;
        int64_t rows = f->packed - b < WIDTH ? f->packed - b : WIDTH;
        if (rows < WIDTH)
            memset(panel, 0, (size_t)(depth * WIDTH) * sizeof *panel);
        NAME(transpose)((MATRIX){f->old_h.data + b * f->old_h.row, f->old_h.row, f->old_h.column}, rows, f->n.state, NULL, panel, WIDTH);
        if (f->n.features > 0)
            NAME(transpose)((MATRIX){f->input.data + b * f->input.row, f->input.row, f->input.column}, rows, f->n.features, NULL,
                            inputs, WIDTH);
    }
}

/* z0, z1 and z2 of the states from s on, for what is in panels, into their places in gates. */
static void NAME(add_up)(const NAME(forward) * f, int64_t s, int64_t count)
{
    const int64_t depth = f->n.state + f->n.features;
    REAL tile[STATES * WIDTH];
    for (int64_t gate = 0; gate < 3; gate++) {
        const int64_t first = gate * f->n.state + s;
        NAME(product) p = {f->weights.data + first * f->weights.row, f->panels, tile, f->weights.row, 1, WIDTH, WIDTH, count, depth};
        for (int64_t b = 0; b < f->packed; b += WIDTH, p.b += WIDTH * depth) {
            int64_t rows = f->packed - b < WIDTH ? f->packed - b : WIDTH;
            NAME(multiply)(&p);
            NAME(transpose)((MATRIX){tile, WIDTH, 1}, count, rows, f->bias + first, f->gates + b * 4 * f->n.state + first,
                            4 * f->n.state);
        }
    }
}

/* The same for one row of the batch that is in no panel: four sums at a time, along the depth. */
static void NAME(add_up_row)(const NAME(forward) * f, int64_t b, int64_t s, int64_t count)
{
    REAL *z = f->gates + b * 4 * f->n.state;
    V sums[4];
    for (int64_t i = 0; i < 3 * count; i += 4) {
        int64_t n[4];
        for (int64_t r = 0; r < 4; r++) {
            int64_t at = i + r < 3 * count ? i + r : i;
            n[r] = at / count * f->n.state + s + at % count;
        }
        V s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        for (int part = 0; part < 2; part++) {
            const MATRIX x = part ? f->input : f->old_h;
            const int64_t begin = part ? f->n.state : 0, depth = part ? f->n.features : f->n.state;
            for (int64_t k = 0; k < depth; k += LANES) {
                const V of = NAME(load)(x, b, k, depth - k);
                s0 += of * NAME(load)(f->weights, n[0], begin + k, depth - k);
                s1 += of * NAME(load)(f->weights, n[1], begin + k, depth - k);
                s2 += of * NAME(load)(f->weights, n[2], begin + k, depth - k);
                s3 += of * NAME(load)(f->weights, n[3], begin + k, depth - k);
            }
        }
        sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
        for (int64_t r = 0; r < 4; r++) {
            REAL sum = 0;
            for (int64_t lane = 0; lane < LANES; lane++)
                sum += sums[r][lane];
            z[n[r]] = sum + f->bias[n[r]];
        }
    }
}

static ALWAYS_INLINE void NAME(activate)(const NAME(forward) * f, int64_t b, int64_t s, int64_t count)
{
    const int64_t state = f->n.state;
    const MATRIX z = {f->gates, 4 * state, 1};
    REAL *out = f->gates + b * 4 * state + s;
    V i = NAME(sigmoid)(NAME(load)(z, b, s, count)), o = NAME(sigmoid)(NAME(load)(z, b, state + s, count));
    V g = NAME(elu)(NAME(load)(z, b, 2 * state + s, count)), cell = NAME(load)(f->old_cell, b, s, count) + g * i;
    V t = NAME(tanh)(cell);
    NAME(store)(out, i, count);
    NAME(store)(out + state, o, count);
    NAME(store)(out + 2 * state, g, count);
    NAME(store)(out + 3 * state, t, count);
    NAME(store)(f->new_cell + b * state + s, cell, count);
    NAME(store)(f->new_h + b * state + s, t * o, count);
}

static opjit_status NAME(forward_range)(int64_t begin, int64_t end, void *context)
{
    const NAME(forward) *f = (const NAME(forward) *)context;
    for (int64_t s = begin * STATES; s < end * STATES && s < f->n.state; s += STATES) {
        int64_t count = f->n.state - s < STATES ? f->n.state - s : STATES;
        NAME(add_up)(f, s, count);
        for (int64_t b = f->packed; b < f->n.batch; b++)
            NAME(add_up_row)(f, b, s, count);
        for (int64_t b = 0; b < f->n.batch; b++)
            for (int64_t at = 0; at < count; at += LANES)
                NAME(activate)(f, b, s + at, count - at);
    }
    return OPJIT_OK;
}

static opjit_status NAME(run_forward)(const lltm_sizes *n, const opjit_tensor *input, const opjit_tensor *weights,
                                      const opjit_tensor *bias, const opjit_tensor *old_h, const opjit_tensor *old_cell,
                                      REAL *new_h, REAL *new_cell, REAL *gates)
{
    NAME(forward) f = {.n = *n, .input = NAME(view)(input), .old_h = NAME(view)(old_h), .old_cell = NAME(view)(old_cell),
                       .gates = gates, .new_h = new_h, .new_cell = new_cell};
    const int64_t depth = n->state + n->features, rest = n->batch % WIDTH;
    const void *dense, *dense_bias;
    OPJIT_TRY(side_by_side(weights, &dense, &f.weights.row));
    OPJIT_TRY(side_by_side(bias, &dense_bias, NULL));
    f.weights.data = (const REAL *)dense;
    f.weights.column = 1;
    f.bias = (const REAL *)dense_bias;
    f.packed = rest <= WIDTH / FEW ? n->batch - rest : n->batch;
    if (f.packed > 0) {
        void *panels;
        OPJIT_TRY(opjit_scratch(&panels, (f.packed + WIDTH - 1) / WIDTH * WIDTH * depth * (int64_t)sizeof(REAL), input));
        f.panels = (REAL *)panels;
        NAME(pack)(&f);
    }
    return opjit_parallel_for(0, (n->state + STATES - 1) / STATES, grain(3 * STATES * depth * n->batch), NAME(forward_range), &f);
}

#endif
#ifdef OPJIT_OP_lltm_backward

/* ---------------------------------------------------------------------------------------------- */
/* Backward                                                                                       */

typedef struct NAME(backward) {
    lltm_sizes n;
    MATRIX grad_h, grad_cell, gates;
    REAL *dz, *bias, *old_cell; /* (B, 3S); the gradients of bias and old_cell */
} NAME(backward);

/* The gradients of z and old_cell of some rows of the batch, for a vector of states; those of z are added to the sums. */
static ALWAYS_INLINE void NAME(differentiate)(const NAME(backward) * d, int64_t begin, int64_t end, int64_t s, int64_t count, V *sums)
{
    const int64_t state = d->n.state;
    V sum0 = {0}, sum1 = {0}, sum2 = {0};
    for (int64_t b = begin; b < end; b++) {
        REAL *dz = d->dz + b * 3 * state + s;
        V i = NAME(load)(d->gates, b, s, count), o = NAME(load)(d->gates, b, state + s, count);
        V g = NAME(load)(d->gates, b, 2 * state + s, count), t = NAME(load)(d->gates, b, 3 * state + s, count);
        V h = NAME(load)(d->grad_h, b, s, count), cell = h * o * (1 - t * t) + NAME(load)(d->grad_cell, b, s, count);
        V z0 = cell * g * i * (1 - i), z1 = h * t * o * (1 - o);
        V z2 = cell * i * NAME(select)((W)(g > 0), (V){0} + 1, g + 1);
        NAME(store)(dz, z0, count);
        NAME(store)(dz + state, z1, count);
        NAME(store)(dz + 2 * state, z2, count);
        NAME(store)(d->old_cell + b * state + s, cell, count);
        sum0 += z0, sum1 += z1, sum2 += z2;
    }
    sums[0] += sum0, sums[1] += sum1, sums[2] += sum2;
}

/* Rows are added by 16, those sums by 16, and these: as exact as a tree of additions. */
static void NAME(differentiate_all)(const NAME(backward) * d, int64_t s, int64_t count)
{
    V sums[3] = {{0}}, total[3] = {{0}};
    for (int64_t b = 0; b < d->n.batch; b += 16) {
        NAME(differentiate)(d, b, b + 16 < d->n.batch ? b + 16 : d->n.batch, s, count, sums);
        for (int gate = 0; gate < 3 && (b % 256 == 240 || b + 16 >= d->n.batch); gate++) {
            total[gate] += sums[gate];
            sums[gate] = (V){0};
        }
    }
    for (int64_t gate = 0; gate < 3 && d->bias; gate++)
        NAME(store)(d->bias + gate * d->n.state + s, total[gate], count);
}

static opjit_status NAME(differentiate_range)(int64_t begin, int64_t end, void *context)
{
    const NAME(backward) *d = (const NAME(backward) *)context;
    for (int64_t s = begin * LANES; s < end * LANES && s < d->n.state; s += LANES)
        NAME(differentiate_all)(d, s, d->n.state - s);
    return OPJIT_OK;
}

/* A product of any number of columns. Those that do not fill a tile are copied, with zeros behind them. */
typedef struct NAME(columns) {
    NAME(product) p;
    int64_t count;
    REAL *rest;
} NAME(columns);

static void NAME(multiply_rest)(NAME(product) p, const REAL *rest, int64_t count)
{
    const int64_t rows = p.rows, c_row = p.c_row;
    REAL tile[ROWS * WIDTH], *c = p.c;
    p.b = rest;
    p.c = tile;
    p.b_row = p.c_row = WIDTH;
    for (int64_t r = 0; r < rows; r += ROWS, p.a += ROWS * p.row) {
        p.rows = rows - r < ROWS ? rows - r : ROWS;
        NAME(multiply)(&p);
        for (int64_t i = 0; i < p.rows; i++)
            memcpy(c + (r + i) * c_row, tile + i * WIDTH, (size_t)count * sizeof *c);
    }
}

/* The parts are CHUNK rows of one tile's width; those of the same rows follow each other. */
static opjit_status NAME(multiply_range)(int64_t begin, int64_t end, void *context)
{
    const NAME(columns) *all = (const NAME(columns) *)context;
    const int64_t across = (all->count + WIDTH - 1) / WIDTH;
    for (int64_t i = begin; i < end; i++) {
        NAME(product) p = all->p;
        const int64_t r = i / across * CHUNK, column = i % across * WIDTH;
        p.rows = p.rows - r < CHUNK ? p.rows - r : CHUNK;
        p.a += r * p.row;
        p.b += column;
        p.c += r * p.c_row + column;
        if (all->count - column >= WIDTH)
            NAME(multiply)(&p);
        else
            NAME(multiply_rest)(p, all->rest, all->count - column);
    }
    return OPJIT_OK;
}

static opjit_status NAME(multiply_columns)(NAME(product) p, int64_t count, const opjit_tensor *like)
{
    const int64_t whole = count / WIDTH * WIDTH;
    NAME(columns) all = {p, count, NULL};
    void *memory;
    if (p.depth == 0 || count == 0) { /* nothing to add up, and no memory to point into */
        for (int64_t r = 0; r < p.rows && count > 0; r++)
            memset(p.c + r * p.c_row, 0, (size_t)count * sizeof(REAL));
        return OPJIT_OK;
    }
    if (whole < count) {
        OPJIT_TRY(opjit_scratch(&memory, p.depth * WIDTH * (int64_t)sizeof(REAL), like));
        all.rest = (REAL *)memory;
        memset(memory, 0, (size_t)(p.depth * WIDTH) * sizeof(REAL));
        for (int64_t i = 0; i < p.depth; i++)
            memcpy(all.rest + i * WIDTH, p.b + i * p.b_row + whole, (size_t)(count - whole) * sizeof(REAL));
    }
    return opjit_parallel_for(0, (p.rows + CHUNK - 1) / CHUNK * ((count + WIDTH - 1) / WIDTH),
                              grain(WIDTH * (p.rows < CHUNK ? p.rows : CHUNK) * p.depth), NAME(multiply_range), &all);
}

/* The gradients of old_h and input: dz weights, whose columns are those of both. */
static opjit_status NAME(backward_inputs)(const NAME(backward) * d, const opjit_tensor *weights, REAL *old_h, REAL *input)
{
    const int64_t depth = 3 * d->n.state;
    const void *dense;
    NAME(product) p = {.a = d->dz, .row = depth, .step = 1, .rows = d->n.batch, .depth = depth};
    OPJIT_TRY(side_by_side(weights, &dense, &p.b_row));
    p.b = (const REAL *)dense;
    p.c = old_h;
    p.c_row = d->n.state;
    OPJIT_TRY(NAME(multiply_columns)(p, d->n.state, weights));
    p.b += d->n.state;
    p.c = input;
    p.c_row = d->n.features;
    return NAME(multiply_columns)(p, d->n.features, weights);
}

/* The gradient of the weights: dz^T [old_h, x]. */
static opjit_status NAME(backward_weights)(const NAME(backward) * d, const opjit_tensor *old_h, const opjit_tensor *input,
                                           REAL *weights)
{
    const int64_t rows = 3 * d->n.state;
    const void *dense;
    NAME(product) p = {.a = d->dz, .c = weights, .row = 1, .step = rows, .rows = rows, .depth = d->n.batch};
    p.c_row = d->n.state + d->n.features;
    OPJIT_TRY(side_by_side(old_h, &dense, &p.b_row));
    p.b = (const REAL *)dense;
    OPJIT_TRY(NAME(multiply_columns)(p, d->n.state, old_h));
    OPJIT_TRY(side_by_side(input, &dense, &p.b_row));
    p.b = (const REAL *)dense;
    p.c += d->n.state;
    return NAME(multiply_columns)(p, d->n.features, input);
}

static opjit_status NAME(run_backward)(const lltm_backward_call *call)
{
    NAME(backward) d = {.n = call->n, .grad_h = NAME(view)(call->grad_h), .grad_cell = NAME(view)(call->grad_cell),
                        .gates = NAME(view)(call->gates), .old_cell = (REAL *)call->grad_old_cell->data};
    const int64_t batch = d.n.batch, state = d.n.state;
    void *dz;
    OPJIT_TRY(opjit_scratch(&dz, batch * 3 * state * (int64_t)sizeof(REAL), call->gates));
    d.dz = (REAL *)dz;
    d.bias = call->parameters ? (REAL *)call->grad_bias->data : NULL;
    OPJIT_TRY(opjit_parallel_for(0, (state + LANES - 1) / LANES, grain(32 * batch * LANES), NAME(differentiate_range), &d));
    if (call->inputs)
        OPJIT_TRY(NAME(backward_inputs)(&d, call->weights, (REAL *)call->grad_old_h->data, (REAL *)call->grad_input->data));
    if (call->parameters)
        OPJIT_TRY(NAME(backward_weights)(&d, call->old_h, call->input, (REAL *)call->grad_weights->data));
    return OPJIT_OK;
}

#endif
