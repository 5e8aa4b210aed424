"""Building blocks of models, as plain objects over tensors.

Not nn.Module: nothing is trained here, and a module's call costs more than a small layer's arithmetic
at batch size 1.
"""
