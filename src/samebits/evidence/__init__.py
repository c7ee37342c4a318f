"""What a run leaves behind, and how it is kept: capsules, receipts, the event log, the execution identity.

Needs numpy, safetensors and jsonschema; nothing here imports an engine, a trainer or torch.
"""
