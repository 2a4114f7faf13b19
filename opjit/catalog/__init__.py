"""The ops of this process, and the folders and packages that they are found in."""
