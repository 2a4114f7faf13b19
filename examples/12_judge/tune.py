"""Search for a fast kernel: vary its numbers, judge each variant, and continue from the best one. python tune.py [VARIANTS]"""

import asyncio
import random
import sys
from pathlib import Path

import torch

import opjit

# begin: kernel
C = """
opjit_status row_sum_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    const int64_t rows = x->sizes[0], columns = x->sizes[1];
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "row_sum takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty(out, 1, x->sizes, x->dtype, x));
    for (int64_t row = 0; row < rows; row++) {
        const float *from = (const float *)x->data + row * columns;
        float sums[%(lanes)d] = {0};
        int64_t i = 0;
        for (; i + %(lanes)d <= columns; i += %(lanes)d)
            for (int lane = 0; lane < %(lanes)d; lane++)
                sums[lane] += from[i + lane];
        for (; i < columns; i++)
            sums[0] += from[i];
        float sum = 0;
        for (int lane = 0; lane < %(lanes)d; lane++)
            sum += sums[lane];
        ((float *)out->data)[row] = sum;
    }
    return OPJIT_OK;
}
"""
# end: kernel
CUDA = """// opjit: launch row_sum(x, out, x.size[0], x.size[1]) grid=(x.size[0] * %(lanes)d + %(block)d - 1) / %(block)d block=%(block)d
__global__ void __launch_bounds__(%(block)d) row_sum(const float *from, float *to, int64_t rows, int64_t columns)
{
    int64_t row = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / %(lanes)d;
    int lane = threadIdx.x %% %(lanes)d;
    float sum = 0;
    for (int64_t i = lane; row < rows && i < columns; i += %(lanes)d)
        sum += from[row * columns + i];
    for (int step = %(lanes)d / 2; step > 0; step /= 2)
        sum += __shfl_down_sync(~0u, sum, step, %(lanes)d);
    if (row < rows && lane == 0)
        to[row] = sum;
}
"""


# begin: loop
async def tune(variants: int) -> list[float]:
    """Judge variants, four at a time, and return the speed-ups over the reference in the order of verdicts."""
    speeds, best, fastest = [], {"lanes": 1, "block": 128}, 0.0
    text = CUDA if torch.cuda.is_available() else C
    async with opjit.judge.Judge(str(Path(__file__).parent)) as judge:
        while len(speeds) < variants:
            lanes, blocks = [1, 2, 4, 8, 16, 32], [64, 256, 512, best["block"]]
            tried = [{"lanes": random.choice(lanes), "block": random.choice(blocks)} for _ in range(4)]
            verdicts = await asyncio.gather(*(judge(text % each, str(each)) for each in tried))
            for each, verdict in zip(tried, verdicts, strict=True):
                speed = (verdict.reference_us or 0) / (verdict.median_us or 1) if verdict.verdict == "correct" else 0.0
                if speed > fastest:
                    fastest, best = speed, each
                speeds.append(speed)
                print(f"{verdict.verdict:<8} {speed:5.2f} x  {each}  {verdict.message}")
    print(f"best: {best}, {fastest:.2f}x the speed of torch.sum")
    return speeds
# end: loop


if __name__ == "__main__":
    found = asyncio.run(tune(int(sys.argv[1]) if len(sys.argv) > 1 else 16))
    try:
        from matplotlib import pyplot
    except ImportError:
        print("pip install matplotlib, and this draws the speeds")
    else:
        pyplot.plot(found, ".", label="variants")
        pyplot.plot([max(found[:number + 1]) for number in range(len(found))], label="best so far")
        pyplot.xlabel("candidate")
        pyplot.ylabel("speed, torch.sum = 1")
        pyplot.legend()
        pyplot.savefig("tune.png")
