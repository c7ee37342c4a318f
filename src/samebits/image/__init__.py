"""The image: what goes in (plan, locking), how it is composed (store, layers, compose), its manifest (delivery)."""
