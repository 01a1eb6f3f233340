"""Settings shared by all tests."""

from hypothesis import settings

# A first call may load a library or compile: how long one example takes says nothing about the property.
settings.register_profile("bestiary", deadline=None)
settings.load_profile("bestiary")
