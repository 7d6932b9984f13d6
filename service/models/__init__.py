"""The decoder family that is weighed: plain JAX with Flax NNX, importing nothing of the service."""
