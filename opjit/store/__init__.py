"""The store of binaries: lookup, verification, publishing and pruning, and the lock for
builders.
"""
