"""The store of binaries: lookup, verification, publishing and pruning, and the lock that builders take."""
