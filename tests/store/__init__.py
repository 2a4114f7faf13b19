"""Modules whose tests are not in the file of their name, and where these are:
elf: store/test_store.py builder/test_binaries.py
entry: store/test_store.py store/test_damage.py
inventory: store/test_prune.py
layers: store/test_folders.py
manifest: store/test_store.py store/test_format.py"""
