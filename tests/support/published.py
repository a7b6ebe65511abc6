"""Bytes of the published models, as their files have them."""

# Component bytes of the trunk; routed experts by format, and everything.
PARTS = {
    "flash": {
        **{"attention": 4_599_335_040, "shared experts": 1_082_196_480, "compressor": 525_722_624},
        **{"indexer": 275_353_344, "mhc": 135_537_756, "gate": 90_218_496, "hash table": 18_616_320},
        **{"embedding": 1_059_061_760, "head": 1_059_061_760, "norm": 855_808, "mtp": 3_593_787_756},
    },
    "pro": {
        **{"attention": 18_294_573_440, "shared experts": 4_029_923_520, "compressor": 1_344_566_272},
        **{"indexer": 625_367_040, "mhc": 336_278_412, "gate": 335_895_552, "hash table": 18_616_320},
        **{"embedding": 1_853_358_080, "head": 1_853_358_080, "norm": 2_044_416, "mtp": 13_956_587_692},
    },
}
ROUTED = {
    ("flash", "official"): 147_169_738_752,
    ("flash", "modelopt"): 155_827_046_400,
    ("pro", "official"): 822_054_223_872,
    ("pro", "modelopt"): 870_410_916_864,
}
STORED = {
    ("flash", "official"): 159_609_485_896,
    ("flash", "modelopt"): 168_266_793_544,
    ("pro", "official"): 864_704_792_696,
    ("pro", "modelopt"): 913_061_485_688,
}
