"""What the layers remember of each sequence, for target and drafter alike.

Owns rows per sequence and the tensors behind them; only `CacheStore.commit` moves a length.
Must not touch layer mathematics, nor know who is accepted or why.
"""
