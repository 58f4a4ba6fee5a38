"""Stable ids of headwise's statistics, by a digest of their definitions.

Two definitions with the same id describe the same numbers. Files of scans save the id, and scans
are merged and compared only if the ids agree. When the words of a definition change, add a row:
with the old id if the numbers are the same, else with a new id (``entropy-2``). Never remove a row,
since old files have old words.
"""

from __future__ import annotations

# `Definition.id_by_formula_digest` -> the id of the meaning
MEANINGS = {
    "entropy:65bb4d07510abd12": "entropy-1",
    "relative_entropy:48d3e8fa7844b0de": "relative_entropy-1",
    "maximum:6a581565c45b9be1": "maximum-1",
    "effective_keys:df57bab742b9b8a1": "effective_keys-1",
    "participation:da9cf8e4002530e7": "participation-1",
    "logsumexp:ca3d3582536d9815": "logsumexp-1",
    "score_range:b5b0aaaa1b7c919e": "score_range-1",
    "first_token:f9211c3367fb5cb0": "first_token-1",
    "sink:de84c41056df1e9e": "sink-1",
    "most_received:5d81d88adbe0f4af": "most_received-1",
    "previous_token:ff3a2ee58c1d88b1": "previous_token-1",
    "offset_profile:a9e98c5a5b068bf0": "offset_profile-1",
    "distance:604bc5bf47efead2": "distance-1",
    "within_16:b57e5f670d098d81": "within_16-1",
    "within_64:b357d38a6971164b": "within_64-1",
    "within_256:9a8a05f9abf50f9e": "within_256-1",
    "duplicate_token:f7b424db58a0cb4c": "duplicate_token-1",
    "induction:ecadaaa6cc8fc91c": "induction-1",
    "copying:d86a5e6ccd66af1c": "copying-1",
    "separator:38bda03284e14dc7": "separator-1",
    "special:d23a42795ec4349e": "special-1",
    "contribution_norm:6f6cd39946d9d21b": "contribution_norm-1",
    "relative_contribution:b44c2d99f6cb781e": "relative_contribution-1",
    "value_weighted:f342c5b10cb66aa7": "value_weighted-1",
    "effective_rank:18fbcbd3a4371a5e": "effective_rank-1",
    "output_cosine:d595e316982a6519": "output_cosine-1",
    "cka:bde2247e7dafa9bc": "cka-1",
    "total_variation:1c4d2ff765082b7f": "total_variation-1",
    "top_keys:ad8bd89fbffefa44": "top_keys-1",
    "map:2e4b192606121d95": "map-1",
    "map:c477bf5e7e8da89d": "map-1",
    "top_keys_of_every_query:664c1b056d770322": "top_keys_of_every_query-1",
    "gate_gradient:1c6cf666036f7174": "gate_gradient-1",
    "gate_gradient_normalised:29cb83c30a134d16": "gate_gradient_normalised-1",
    "taylor:0881ab4c088d49d9": "taylor-1",
    "ablation_zero:9736b842352b6e2f": "ablation_zero-1",
    "ablation_mean:bf8af73259ca55e6": "ablation_mean-1",
    "ablation_resample:9aacfaab071e343d": "ablation_resample-1",
}
