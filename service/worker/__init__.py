"""Claims jobs under a lease and supervises their child processes."""
