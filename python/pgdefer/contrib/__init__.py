"""Bindings to other packages, each an extra: the core imports none of them."""
