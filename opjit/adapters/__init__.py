"""The caches of other compilers, verified by opjit's rules. `import opjit` imports nothing here."""
