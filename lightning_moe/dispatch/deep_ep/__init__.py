"""DeepEP as a token dispatcher; nothing outside this folder imports ``deep_ep``."""
