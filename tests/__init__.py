"""The tests. Their folders are named as opjit's packages; files beside these are about a module of opjit's, or the whole.

Modules whose tests are not in the file of their name, and where these are:
__main__: cli/test_cli.py
api: request/test_places.py test_why.py
batch: ahead/test_precompile.py
files: store/test_folders.py store/test_store.py
progress: test_lock.py request/test_log.py
request: request/test_concurrency.py request/test_warm_path.py
resources: kernels_c/test_contract.py
tensors: testing/test_testing.py judge/test_judge.py
wanted: ahead/test_precompile.py distributed/test_distributed.py"""

import os

# Before torch is imported. Else OpenMP's threads spin while they wait, and where processes share the cores each spins in another's time:
# two with two threads on two cores take 14 times the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# As `opjit test` sets it in its process: where a test runs that command, the zygote would not do for those after it, and all is slow.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
