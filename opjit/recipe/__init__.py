"""Everything that decides the bytes of a binary, and its key."""
