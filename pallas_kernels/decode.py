"""The generic split kernel: attention over the pages of a cache, for any registered scheme.

The contract of every split kernel (generic, lane, warp)::

    split_attention(scheme, calib, copies, pool, block_table, stored, first, *,
                    page_layout, pages_per_block, config, options, interpret) -> (o, m, l)

Arguments:
  scheme: the layer's :class:`jkv.core.Scheme`, static.
  calib: its bound arrays ``{"k": {...}, "v": {...}}``, leaves ``[H, ...]``.
  copies: ``float32[B, H, C, M, D]``, queries in the stored basis (:func:`pallas_kernels.query.prepare_copies`): C = 1,
    or 3 under flags (raw, segment-rotated, head-rotated); M = G * T rows, row = g * T + t. They are multiplied by
    ``options.query_factor(D)``: the softmax scale and log2(e), so that dot products are base-2 scores. With
    ``options.softcap`` c they carry the softmax scale only and the kernel computes ``c tanh(s / c) log2(e)``.
  pool: ``uint8[num_blocks, H, pages_per_block * page_layout.nbytes]``.
  block_table: ``int32[B, NB]``; entries beyond a row's tokens are never used, not even to load from.
  stored: ``int32[B]``: tokens ``first <= i < stored`` of a row are attended to.
  first: ``int32[B]``, or ``int32[B, M]`` where every query row has its own (a sliding window over several query
    tokens): only the generic kernel takes that form, and :mod:`pallas_kernels.attend` sends it nowhere else.
  page_layout, pages_per_block: where the bytes lie (:mod:`jkv.page`).
  config: :class:`pallas_kernels.config.DecodeConfig` with ``num_splits`` above 0. A block that holds fewer than
    ``config.tokens`` tokens gives shorter iterations (:func:`pallas_kernels.config.tile_tokens`).
  options: :class:`pallas_kernels.options.AttentionOptions`; only ``softcap`` and ``scale`` matter here.
  interpret: run in Pallas's interpret mode.

Returns, for S = ``config.num_splits``:
  o: ``float32[B, H, S, M, D]``, the unnormalized sum of p * v in the stored basis of V.
  m: ``float32[B, H, S, M]``, the running maximum of base-2 scores; very negative (never NaN) where nothing was seen.
  l: ``float32[B, H, S, M]``, the sum of p; 0 where nothing was seen.

How tokens are divided among splits is the kernel's own business; it must be balanced for any length.
"""
