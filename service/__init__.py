"""Weighbridge's service: weighs a JAX training step on a mocked TPU topology before it trains."""
