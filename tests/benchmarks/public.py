"""Which way public extensions are built: with light headers, some more of torch's, or torch/extension.h, and why.

    python tests/benchmarks/public.py FOLDER [WORD ...] [--whole]

FOLDER holds checkouts of the repositories of the table, by their names, and eigen, glm, parallel-hashmap; WORDs choose extensions by what
their lines contain. CUDA is compiled for sm_90, and nothing runs. --whole: what light headers refuse is built with torch/extension.h, too.
Flags are those of the projects that define macros; -std= is left out, as torch refuses that of most, and so are optimizations. An extension
whose error no header mends, or that torch/extension.h does not compile either, belongs to no side.
"""

from __future__ import annotations

import argparse
import collections
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from opjit.builder.compile_step import CompilerFailed
from opjit.cpp_extension import binary, build, identity, light
from opjit.cpp_extension.arguments import LoadCall
from opjit.cpp_extension.light import policy
from opjit.errors import OpjitError
from opjit.store import entry
from opjit.store.store import Store, default_root

HALVES = "-U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_HALF2_OPERATORS__"
BFLOATS = f"{HALVES} -U__CUDA_NO_BFLOAT16_OPERATORS__ -U__CUDA_NO_BFLOAT16_CONVERSIONS__ -U__CUDA_NO_BFLOAT162_OPERATORS__"
GE = "-DVERSION_GE_1_1 -DVERSION_GE_1_3 -DVERSION_GE_1_5"
OLD = "-DCUDA_HAS_FP16=1 -D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__"
GEOMETRIC = "-DWITH_PYTHON -DWITH_CUDA -DAT_PARALLEL_OPENMP -fopenmp -Icsrc -I../parallel-hashmap"
DS = f"-Icsrc/includes {GE} -DBF16_AVAILABLE -D__ENABLE_CUDA__ -D__AVX256__ {BFLOATS}"
# Lines: repository, or a folder in one; then an extension's name, sources, and after | what the folder's flags lack.
TABLE = f"""
diff-gaussian-rasterization | -I../glm -Ithird_party/glm
  rasterizer  cuda_rasterizer/*.cu rasterize_points.cu ext.cpp
simple-knn
  simple_knn  spatial.cu simple_knn.cu ext.cpp
Pointnet2_PyTorch/pointnet2_ops_lib/pointnet2_ops/_ext-src | -Iinclude
  pointnet2  src/*.cpp src/*.cu
votenet/pointnet2/_ext_src | -Iinclude
  votenet  src/*.cpp src/*.cu
torch-ngp | {HALVES} -I../cutlass/include -I../cutlass/tools/util/include
  raymarching  raymarching/src/*.cu raymarching/src/*.cpp
  gridencoder  gridencoder/src/*.cu gridencoder/src/*.cpp
  freqencoder  freqencoder/src/*.cu freqencoder/src/*.cpp
  shencoder  shencoder/src/*.cu shencoder/src/*.cpp
  ffmlp  ffmlp/src/*.cu ffmlp/src/*.cpp
lietorch | -Ilietorch/include -I../eigen
  lietorch_backends  lietorch/src/*.cpp lietorch/src/*.cu
  lietorch_extras  lietorch/extras/*.cu lietorch/extras/extras.cpp
DROID-SLAM | -I../eigen
  droid_backends  src/*.cpp src/*.cu
RAFT-Stereo
  corr_sampler  sampler/sampler.cpp sampler/sampler_kernel.cu
ngp_pl/models/csrc | -Iinclude
  vren  *.cpp *.cu
apex | -Icsrc {GE}
  apex_C  csrc/flatten_unflatten.cpp
  amp_C  csrc/amp_C_frontend.cpp csrc/multi_tensor_*.cu csrc/update_scale_hysteresis.cu
  syncbn  csrc/syncbn.cpp csrc/welford.cu
  fused_layer_norm  csrc/layer_norm_cuda.cpp csrc/layer_norm_cuda_kernel.cu
  mlp  csrc/mlp.cpp csrc/mlp_cuda.cu
  fused_dense  csrc/fused_dense.cpp csrc/fused_dense_cuda.cu
  upper_triang_softmax  csrc/megatron/scaled_upper_triang_masked_softmax*.c* | {HALVES}
  generic_masked_softmax  csrc/megatron/generic_scaled_masked_softmax*.c* | {HALVES}
  masked_softmax  csrc/megatron/scaled_masked_softmax*.c* | {HALVES}
  scaled_softmax  csrc/megatron/scaled_softmax*.c* | {HALVES}
  rope  csrc/megatron/fused_rotary_positional_embedding*.c* | {HALVES}
  distributed_adam  apex/contrib/csrc/optimizers/multi_tensor_distopt_adam*.c*
  distributed_lamb  apex/contrib/csrc/optimizers/multi_tensor_distopt_lamb*.c*
  xentropy  apex/contrib/csrc/xentropy/*.c* | -DXENTROPY_VER="\\"0.1\\""
  focal_loss  apex/contrib/csrc/focal_loss/*.c*
  index_mul_2d  apex/contrib/csrc/index_mul_2d/*.c*
  contrib_fused_adam  apex/contrib/csrc/optimizers/fused_adam_cuda*.c*
  contrib_fused_lamb  apex/contrib/csrc/optimizers/fused_lamb_cuda*.c* csrc/multi_tensor_l2norm_kernel.cu
  transducer_joint  apex/contrib/csrc/transducer/transducer_joint*.c*
  transducer_loss  apex/contrib/csrc/transducer/transducer_loss*.c*
  peer_memory  apex/contrib/csrc/peer_memory/*.c*
DeepSpeed | {DS}
  fused_adam  csrc/adam/fused_adam_frontend.cpp csrc/adam/multi_tensor_adam.cu | -Icsrc/adam
  fused_lion  csrc/lion/fused_lion_frontend.cpp csrc/lion/multi_tensor_lion.cu | -Icsrc/lion
  fused_lamb  csrc/lamb/*.c*
  cpu_adam  csrc/adam/cpu_adam.cpp csrc/adam/cpu_adam_impl.cpp | -fopenmp -march=native
  cpu_adagrad  csrc/adagrad/cpu_adagrad.cpp | -fopenmp -march=native
  cpu_lion  csrc/lion/cpu_lion.cpp csrc/lion/cpu_lion_impl.cpp | -fopenmp -march=native
  random_ltd  csrc/random_ltd/*.c*
  spatial_inference  csrc/spatial/csrc/*.c* | -Icsrc/spatial/includes
  fp_quantizer  csrc/fp_quantizer/*.c* | -Icsrc/fp_quantizer/includes
Deformable-DETR/models/ops/src | -I. -DWITH_CUDA {OLD}
  deformable_attention  *.cpp cpu/*.cpp cuda/*.cu
detectron2/detectron2/layers/csrc | -I. -DWITH_CUDA {OLD}
  detectron2  vision.cpp */*.cpp *.cu */*.cu
llm-awq/awq/kernels/csrc | {BFLOATS} -DENABLE_BF16 -fopenmp
  awq  pybind.cpp */*.cu */*/*.cu attention/*.cpp
RWKV-LM
  timex  RWKV-v2-RNN/cuda/*.c* | -DTmax=768 -DBF=8 -DBB=2
  wkv  RWKV-v4/cuda/*.c* | -DTmax=1024
  wkv_neo  RWKV-v4neo/cuda/wkv_op.cpp RWKV-v4neo/cuda/wkv_cuda.cu | -DTmax=1024
  wkv_bf16  RWKV-v4neo/cuda/wkv_op_bf16.cpp RWKV-v4neo/cuda/wkv_cuda_bf16.cu | -DTmax=1024
  wkv5  RWKV-v4neo/cuda/wkv5*.c* | -D_N_=64
pytorch_scatter | {GEOMETRIC}
  scatter  csrc/scatter.cpp csrc/cpu/scatter_cpu.cpp csrc/cuda/scatter_cuda.cu
  segment_coo  csrc/segment_coo.cpp csrc/cpu/segment_coo_cpu.cpp csrc/cuda/segment_coo_cuda.cu
  segment_csr  csrc/segment_csr.cpp csrc/cpu/segment_csr_cpu.cpp csrc/cuda/segment_csr_cuda.cu
  scatter_version  csrc/version.cpp
pytorch_cluster | {GEOMETRIC}
  fps  csrc/fps.cpp csrc/c*/fps_c*
  graclus  csrc/graclus.cpp csrc/c*/graclus_c*
  grid  csrc/grid.cpp csrc/c*/grid_c*
  knn  csrc/knn.cpp csrc/c*/knn_c*
  sampler  csrc/sampler.cpp csrc/c*/sampler_c*
pytorch_sparse | {GEOMETRIC}
  diag  csrc/diag.cpp csrc/c*/diag_c*
  spmm  csrc/spmm.cpp csrc/c*/spmm_c*
  saint  csrc/saint.cpp csrc/cpu/saint_cpu.cpp
  sample  csrc/sample.cpp csrc/cpu/sample_cpu.cpp
  neighbor_sample  csrc/neighbor_sample.cpp csrc/cpu/neighbor_sample_cpu.cpp
OpenPCDet/pcdet/ops
  iou3d_nms  iou3d_nms/src/*.c*
  roiaware_pool3d  roiaware_pool3d/src/*.c*
  roipoint_pool3d  roipoint_pool3d/src/*.c*
  pointnet2_batch  pointnet2/pointnet2_batch/src/*.c*
  bev_pool  bev_pool/src/*.c*
  ingroup_inds  ingroup_inds/src/*.cpp ingroup_inds/src/*.cu
PointRCNN/lib/utils
  rcnn_iou3d  iou3d/src/*.c*
  rcnn_roipool3d  roipool3d/src/*.c*
ChamferDistancePytorch
  chamfer_2D  chamfer2D/*.c*
  chamfer_3D  chamfer3D/*.c*
DirectVoxGO/lib/cuda
  adam_upd  adam_upd*.c*
  render_utils  render_utils*.c*
  total_variation  total_variation*.c*
  ub360_utils  ub360_utils*.c*
stylegan3/torch_utils/ops
  bias_act  bias_act.c*
  upfirdn2d  upfirdn2d.c*
  filtered_lrelu  filtered_lrelu*.c*
stylegan2-pytorch/op
  fused_bias_act  fused_bias_act*.c*
  sg2_upfirdn2d  upfirdn2d*.c*
exllama/exllama_ext | -I.
  exllama  *.cpp *.cu c*_func/*.cu cpu_func/*.cpp
marlin/marlin
  marlin  *.c*
inplace_abn | -Iinclude -DWITH_CUDA
  inplace_abn  src/*.cpp src/*.cu
causal-conv1d/csrc | -I. {BFLOATS}
  causal_conv1d  *.cpp causal_conv1d_update.cu causal_conv1d_fwd.cu causal_conv1d_bwd.cu
SageAttention/csrc | {BFLOATS} -DENABLE_BF16
  sage_fused  fused/*.c*
YOLOX/yolox/layers
  cocoeval  cocoeval/*.cpp
nvdiffrast/csrc | -DNVDR_TORCH
  nvdiffrast  common/*.c* common/cudaraster/impl/*.c* torch/*.cpp
pytorch3d/pytorch3d/csrc | -I.
  pytorch3d_cpu  ext.cpp */*.cpp
extension-cpp/extension_cpp/csrc
  muladd  *.cpp
"""


class Row(NamedTuple):
    """What became of an extension."""

    way: str
    seconds: float  # of CPU
    reason: str


def calls(folder: Path, chosen: list[str]) -> Iterator[LoadCall]:
    """The calls of load that the table's extensions are."""
    place = folder
    common = list[str]()
    for line in filter(None, TABLE.splitlines()):
        words, _, flags = line.partition("|")
        if line[0] != " ":
            place = folder / words.strip()
            common = flags.split()
            continue
        name, *patterns = words.split()
        if chosen and not any(word in f"{place} {line}" for word in chosen):
            continue
        sources = [
            path for one in patterns for path in place.glob(one) if path.suffix in (".cpp", ".cu")
        ]
        own = [*common, *flags.split()]
        macros = [flag for flag in own if flag.startswith(("-D", "-U"))]
        yield LoadCall(
            name=f"public_{name}",
            sources=[*map(str, dict.fromkeys(sources))],
            extra_cuda_cflags=macros,
            with_cuda=True,
            extra_cflags=[*macros, *(flag for flag in own if flag.startswith(("-f", "-m")))],
            extra_ldflags=[flag for flag in own if flag.startswith("-l")],
            extra_include_paths=[
                os.path.abspath(place / flag[2:]) for flag in own if flag.startswith("-I")
            ],
        )


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def built(call: LoadCall, whole: bool) -> Row:
    """Build an extension with light headers and, if `whole`, what these refuse with torch/extension.h."""
    if not call.sources:
        return Row("absent", 0, "")
    store = Store(default_root())
    started = cpu_seconds()
    wanted = binary.of_call(call, store.notes, "9.0")
    first = replace(
        wanted.inputs, light=identity.LIGHT, toolchain=wanted.inputs.light_toolchains[0]
    )
    reason = wanted.without_light() or ""
    for way in () if reason else (first, replace(first, pybind11=True)):
        try:
            made = build.build(way, call, store, True)
        except light.NeedsFullHeaders as lack:
            reason = str(lack)
            if policy.UNKNOWN_TYPE not in reason:
                break
        except OpjitError as error:
            return Row("none", cpu_seconds() - started, str(error))
        else:
            return Row(
                "light", cpu_seconds() - started, entry.read(made.folder)[0].built_with["headers"]
            )
    if whole:
        try:
            build.build(wanted.inputs, call, store, True)
        except (OpjitError, CompilerFailed) as error:
            return Row("none", cpu_seconds() - started, f"{error}\n(light headers: {reason})")
    return Row("torch's", cpu_seconds() - started, reason)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    ways = collections.Counter[str]()
    for call in calls(given.folder.resolve(), given.words):
        row = built(call, given.whole)
        ways[row.way] += 1
        print(
            f"{call.name:32} {len(call.sources):3} {row.way:8} {row.seconds:6.1f}  {row.reason}".replace(
                "\n", "\n    "
            ),
            flush=True,
        )
    print(dict(ways))


if __name__ == "__main__":
    main()
