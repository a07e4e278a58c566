"""Plans in training frameworks, one module for each, which imports the framework when it is used itself.

`ckptplan.integrations.transformers` has a callback for the Trainer of transformers, and for TRL's, which builds on it.
"""
