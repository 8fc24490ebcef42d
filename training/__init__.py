"""Builds the embedded models from nothing: made-up data, a vision tower, a target, a draft head.

Not part of the installed package. Owns everything that makes the folders under
`src/foreglance/embedded`; uses nothing of the engine, whose numbers are checked against these models.
"""
