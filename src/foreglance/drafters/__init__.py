"""Drafters: one kind each, behind one protocol with one verb, `propose`.

Own their caches and what they remember of a sequence. Must not decide acceptance nor write the target's cache.
"""
