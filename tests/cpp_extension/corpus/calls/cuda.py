"""CUDA programs: `results(module, program, "cuda")` calls them with tensors on the GPU."""

from tests.cpp_extension.corpus.program import Program

PROGRAMS = [
    Program(
        "cuda/elementwise_add",
        [
            "m.elementwise_add_cuda(x, y)",
            "m.elementwise_add_cuda(v, u)",
            "m.elementwise_add_cuda(big, big)",
        ],
        ["m.elementwise_add_cuda(x, double)", "m.elementwise_add_cuda(x)"],
        ["elementwise_add_cuda"],
    ),
    Program(
        "cuda/relu",
        ["m.relu_cuda(x)", "m.relu_cuda(double)", "m.relu_cuda(empty)", "after(m.relu_cuda_, x)"],
        ["m.relu_cuda(xt)", "m.relu_cuda(x.cpu())", "m.relu_cuda(i)", "m.relu_cuda(None)"],
        ["relu_cuda", "relu_cuda_"],
    ),
    Program(
        "cuda/gelu_half",
        ["m.gelu(x)", "m.gelu(half)", "m.gelu(xt)", "m.gelu(empty)"],
        ["m.gelu(bf)", "m.gelu(x.cpu())"],
        ["gelu"],
    ),
    Program(
        "cuda/vector_half2",
        [
            "m.add_half2(half, half)",
            "m.add_half2(half * 2, half.flip(0))",
            "m.add_half2(hv[:8], hv[:8].flip(0))",
        ],
        ["m.add_half2(hv, hv)", "m.add_half2(x, x)"],
        ["add_half2"],
    ),
    Program(
        "cuda/bfloat16_scale",
        ["m.scale(bf, 2)", "m.scale(bv, 0.3)", "m.scale(bf * 3, -1)"],
        ["m.scale(x, 2)", "m.scale(bf)"],
        ["scale"],
    ),
    Program(
        "cuda/matmul_naive",
        [
            "m.matmul_cuda(x, w)",
            "m.matmul_cuda(sq, sq)",
            "m.matmul_cuda(big, big.t().contiguous())",
        ],
        ["m.matmul_cuda(x, x)", "m.matmul_cuda(double, w)"],
        ["matmul_cuda"],
    ),
    Program(
        "cuda/matmul_tiled",
        ["m.matmul_tiled(x, w)", "m.matmul_tiled(big, big.t())", "m.matmul_tiled(xt, x)"],
        ["m.matmul_tiled(x, x)", "m.matmul_tiled(x.cpu(), w)", "m.matmul_tiled(v, v)"],
        ["matmul_tiled"],
    ),
    Program(
        "cuda/softmax_shared",
        ["m.softmax_cuda(x)", "m.softmax_cuda(big)", "m.softmax_cuda(sq)"],
        ["m.softmax_cuda(v)", "m.softmax_cuda(double)"],
        ["softmax_cuda"],
    ),
    Program(
        "cuda/reduce_warp",
        ["m.sum_cuda(x)", "m.sum_cuda(big)", "m.sum_cuda(empty)", "m.sum_cuda(v)"],
        ["m.sum_cuda(i)", "m.sum_cuda([x])"],
        ["sum_cuda"],
    ),
    Program(
        "cuda/layer_norm",
        [
            "m.layer_norm(x, v5, v5, 1e-5)",
            "m.layer_norm(double, dv, dv, 1e-5)",
            "m.layer_norm(sq, v5, v5, 0.1)",
        ],
        ["m.layer_norm(x, dv, dv, 1e-5)", "m.layer_norm(half, v5, v5, 1)"],
        ["layer_norm"],
    ),
    Program(
        "cuda/rms_norm",
        ["m.rms_norm(x, v5, 1e-6)", "m.rms_norm(sq, v5, 0.5)", "m.rms_norm(x * 2, v5, 0)"],
        ["m.rms_norm(double, dv, 1)", "m.rms_norm(x, v5)"],
        ["rms_norm"],
    ),
    Program(
        "cuda/streams_guard",
        ["m.fill(x, 2)", "m.fill(empty, 2)", "m.fill(xt, 0.5)"],
        ["m.fill(i, 1)", "m.fill(x, 'a')"],
        ["fill"],
    ),
    Program(
        "cuda/packed_accessor",
        [
            "m.transpose_cuda(x)",
            "m.transpose_cuda(xt)",
            "m.transpose_cuda(i32)",
            "m.transpose_cuda(big)",
        ],
        ["m.transpose_cuda(v)", "m.transpose_cuda(half)"],
        ["transpose_cuda"],
    ),
    Program(
        "cuda/lltm",
        [
            "m.forward(x, lw, lb, x[:, :3].contiguous(), y[:, :3].contiguous())",
            "m.forward.__doc__",
            "m.forward(double, lw.double(), lb.double(), double[:, :3].contiguous(), double[:, 2:].contiguous())",
        ],
        ["m.forward(xt, x, x, x, x)", "m.forward(x)", "m.forward(x.cpu(), x, x, x, x)"],
    ),
    Program(
        "cuda/conv2d",
        [
            "m.conv2d_cuda(img, k, None)",
            "m.conv2d_cuda(img, k, b4)",
            "m.conv2d_cuda(img, k * 2, None)",
        ],
        ["m.conv2d_cuda(x, k, None)", "m.conv2d_cuda(img, k)"],
        ["conv2d_cuda"],
    ),
    Program(
        "cuda/scan",
        ["m.cumsum_cuda(x)", "m.cumsum_cuda(big)", "m.cumsum_cuda(sq)"],
        ["m.cumsum_cuda(torch.zeros(1, 1025).to(x))", "m.cumsum_cuda(double)"],
        ["cumsum_cuda"],
    ),
    Program(
        "cuda/histogram_atomic",
        ["m.histogram(i, 5)", "m.histogram(i.t(), 20)", "m.histogram(target, 3)"],
        ["m.histogram(x, 5)", "m.histogram(i32, 5)"],
        ["histogram"],
    ),
    Program(
        "cuda/constant_memory",
        ["m.blur(v, [0.25, 0.5, 0.25])", "m.blur(x, (1, 0, 0))", "m.blur(big, [1, 2, 3])"],
        ["m.blur(v, [1, 2])", "m.blur(v, 1)"],
        ["blur"],
    ),
    Program(
        "cuda/float4_copy",
        ["m.copy_vectorized(x)", "m.copy_vectorized(v4)", "m.copy_vectorized(wide)"],
        ["m.copy_vectorized(v)", "m.copy_vectorized(double)"],
        ["copy_vectorized"],
    ),
    Program(
        "cuda/template_functor",
        ["m.square(x)", "m.square(i)", "m.shift(xt, 2)", "m.shift(empty, 1)", "m.square(u8)"],
        ["m.square(half)", "m.shift(i, 1)"],
        ["square", "shift"],
    ),
    Program(
        "cuda/attention_flash",
        ["m.attention(x3, x3, x3)", "m.attention(x3, x3.flip(0), x3)", "m.attention(y3, y3, y3)"],
        ["m.attention(x3, y3, x3)", "m.attention(x3, x3)"],
        ["attention"],
    ),
    Program(
        "cuda/grayscale",
        [
            "m.rgb_to_grayscale(torch.arange(60).reshape(4, 5, 3).to(u8))",
            "m.rgb_to_grayscale(torch.full((17, 18, 3), 200).to(u8))",
            "m.rgb_to_grayscale(torch.zeros(1, 1, 3).to(u8))",
        ],
        ["m.rgb_to_grayscale()", "m.rgb_to_grayscale(1)"],
        ["rgb_to_grayscale"],
    ),
    Program(
        "cuda/square_matrix",
        ["m.square_matrix(x)", "m.square_matrix(big)", "m.square_matrix(sq)"],
        ["m.square_matrix(double)", "m.square_matrix(v)"],
        ["square_matrix"],
    ),
    Program(
        "cuda/pointwise_fused",
        ["m.fused(x, v5, 2, True)", "m.fused(x, v5, 0.5, False)", "m.backward(x, y)"],
        ["m.fused(x, v4, 1, True)", "m.fused(x.cpu(), v5, 1, True)", "m.fused(x, v5, 1)"],
        ["fused", "backward"],
    ),
    Program(
        "cuda/cross_entropy",
        [
            "m.cross_entropy(x, target)",
            "m.cross_entropy(x * 3, target)",
            "m.cross_entropy(x[:2], target[:2])",
        ],
        ["m.cross_entropy(x, target.int())", "m.cross_entropy(double, target)"],
        ["cross_entropy"],
    ),
    Program(
        "cuda/pool_lambda",
        [
            "m.max_pool1d(x, 2, 1)",
            "m.max_pool1d(half, 3, 2)",
            "m.max_pool1d(bf, 2, 3)",
            "m.max_pool1d(img, 3, 2)",
        ],
        ["m.max_pool1d(x, 2, 0)", "m.max_pool1d(i, 2, 1)"],
        ["max_pool1d"],
    ),
    Program(
        "cuda/cooperative",
        ["m.block_sums(x)", "m.block_sums(big)", "m.block_sums(v)"],
        ["m.block_sums(i)", "m.block_sums()"],
        ["block_sums"],
    ),
    Program(
        "cuda/bindings_in_cu",
        ["m.negate(x)", "m.negate(x=v)", "m.negate(big)"],
        ["m.negate(double)", "m.negate(y=x)"],
    ),
]
