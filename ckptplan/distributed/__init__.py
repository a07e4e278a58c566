"""All that training on several ranks changes: DDP and FSDP2, and the calls that all ranks make together."""
