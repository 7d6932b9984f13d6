"""Real train steps on attached devices, and the checks that only real steps can make."""
