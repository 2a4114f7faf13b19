"""The ops of this process: the folders, packages and strings that they come from, and their replacement while they are in use."""
