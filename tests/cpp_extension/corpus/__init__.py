"""Programs that are built with torch's headers and the fast way, and compared."""
