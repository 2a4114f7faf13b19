"""Builds: from a recipe, the description of a build, to a published entry.

To watch a build, run `OPJIT_CACHE="$(mktemp -d)" OPJIT_VERBOSE=1 opjit get allreduce`. This is the path of
`opjit.get("allreduce", "cpu")` when no cache has the op, in the order of the calls:

 1. api.py, get: find the op and make it ready
 2. catalog/registry.py, find: return the declared op
 3. request.py, ready: give torch the kernel for a device, once per op and device
 4. request.py, _load_kernel: get the entry and open its library
 5. request.py, entry: look for the binary, or fetch or build it
 6. wanted.py, of_op: compute the recipe and the key
 7. request.py, lookup: look in all caches. A hit ends here
 8. request.py, fetch_or_build: hold the lock, look again, query the remote cache
 9. wanted.py, build: write inline code to a file, and keep errors
10. builder/build.py, build: find the tools, build, and show the compilers' warnings
11. builder/publish.py, build_and_publish: build in the store or in a private directory
12. builder/publish.py, _publish_in: stage a directory, and rename it
13. builder/publish.py, _make_entry: compile, check the binary, write the manifest
14. builder/build.py, compile_in: an inner function that _make_entry receives
15. builder/build.py, _compile_checked: compile, and read the recorder's file
16. builder/op_library.py, compile_library: write the generated wrapper, compile, and link
17. builder/compile_step.py, by_nvrtc_or_nvcc: choose the compiler; for a CPU, call the next function
18. builder/op_library.py, without_nvrtc: compile C, CUDA with nvcc, or code of another device
19. builder/op_library.py, _build: pass sources and flags to torch
20. builder/torch_builder.py, run_build: let torch write build.ninja and run ninja
21. builder/ninja.py, run_ninja: run commands under the recorder, within limits

When the entry is published, `_load_kernel` opens its library with `load` of loader.py. For CUDA, cuda.py splits a .cu file
(host_device_split.py, cuda_reader.py), computes its text as nvcc would see it (cuda_text.py), and compiles the halves (nvrtc.py).

Three things must stay true:

- The binary follows from the key, so the builder reads only inputs that the recipe contains.
- A build writes only into its staging directory, and appears by one rename.
- A failed tool ends in one BuildError with its log.

When you change generated text, increase GLUE_GENERATOR in recipe/recipe.py.
"""

import threading

# during a build: `names`, the functions of torch's module, which opjit's functions call
torch_call = threading.local()
