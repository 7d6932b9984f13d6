"""From a spec to a report: a child process compiles with the real TPU compiler and reads its dump."""
