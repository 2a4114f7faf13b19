#include "opjit.h"

opjit_status transpose_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous && x->dim == 2,
                "transpose takes a contiguous float32 matrix");
    const int64_t rows = x->sizes[0], columns = x->sizes[1], sizes[] = {columns, rows};
    OPJIT_TRY(opjit_empty(out, 2, sizes, x->dtype, x));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    for (int64_t row = 0; row < rows; row += ROWS)
        for (int64_t column = 0; column < columns; column += COLUMNS)
            for (int64_t j = column; j < column + COLUMNS && j < columns; j++)
                for (int64_t i = row; i < row + ROWS && i < rows; i++)
                    to[j * rows + i] = from[i * columns + j];
    return OPJIT_OK;
}
