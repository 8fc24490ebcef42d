"""The operations of the hot path, one small function each, behind one protocol.

Every function gives a row the same bits whatever its batch: that is what makes drafts exact (docs/exactness.md).
Owns kernels and the self-test that chooses among them. Knows no family, no sequence and no cache.
"""
