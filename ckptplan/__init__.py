"""ckptplan."""
