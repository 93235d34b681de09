"""Layers whose attention and experts share devices and exchanges: sequences are split over the expert axis, and key and
value rows travel beside hidden rows.

  ranges.py     which key/value rows travel, and where each stands on its way        (pure integers)
  attention.py  attention over rows that come in pieces
  kv.py         the key/value part of an exchange; all_gather and ring as baselines
  rank.py       one rank's share of a block, in stages between which rows travel
  coship.py     the parallel block, and the sequential one in two microbatches
  sequential.py the latter's schedule
  microbatch.py two microbatches of whole sequences, each beside the other's exchanges
  at_expert.py  attention at the expert's rank
  ledger.py     bytes of a layer, by part                                            (pure integers)
"""
