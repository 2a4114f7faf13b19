"""Modules whose tests are not in the file of their name, and where these are:
op: catalog/test_paths.py catalog/test_reload.py
graph_cache: operators/test_compile_cache.py
registration: catalog/test_bundled.py
rules: operators/test_transforms.py operators/test_sharding.py
variants: test_tune.py"""
