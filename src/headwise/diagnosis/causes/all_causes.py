"""All causes, in the order in which equal ones are named."""

from __future__ import annotations

from headwise.diagnosis.causes.cause import Cause
from headwise.diagnosis.causes.factor_of_projection import ProjectionFactorCause
from headwise.diagnosis.causes.heads_interleaved import HeadsInterleavedCause
from headwise.diagnosis.causes.heads_permuted import HeadsPermutedCause
from headwise.diagnosis.causes.k_and_v_exchanged import KAndVExchangedCause
from headwise.diagnosis.causes.kv_groups_of_fused_rows import FusedRowGroupsCause
from headwise.diagnosis.causes.kv_heads_tiled import KVHeadsTiledCause
from headwise.diagnosis.causes.missing_biases import MissingBiasesCause
from headwise.diagnosis.causes.nesting_of_fused_rows import FusedRowNestingCause
from headwise.diagnosis.causes.order_of_fused_rows import FusedRowOrderCause
from headwise.diagnosis.causes.output_heads_in_another_group_order import OutputGroupOrderCause
from headwise.diagnosis.causes.output_projection_reshaped import OutputReshapedCause
from headwise.diagnosis.causes.q_and_k_exchanged import QAndKExchangedCause
from headwise.diagnosis.causes.q_and_v_exchanged import QAndVExchangedCause
from headwise.diagnosis.causes.rotary_permutation_doubled import RotaryPermutationDoubledCause
from headwise.diagnosis.causes.rotary_permutation_missing import RotaryPermutationMissingCause
from headwise.diagnosis.causes.rotary_permutation_of_other_heads import RotaryPermutationHeadsCause
from headwise.diagnosis.causes.rotary_theta import RotaryThetaCause
from headwise.diagnosis.causes.rounded_projections import RoundedProjectionsCause
from headwise.diagnosis.causes.rows_zero import RowsZeroCause
from headwise.diagnosis.causes.scale import ScaleCause
from headwise.diagnosis.causes.shards_in_the_wrong_order import ShardOrderCause
from headwise.diagnosis.causes.sign_of_projection import ProjectionSignCause
from headwise.diagnosis.causes.square_matrix_transposed import MatrixTransposedCause
from headwise.diagnosis.causes.weights_at_initial_values import InitialWeightsCause

CAUSES: tuple[Cause, ...] = (
    QAndKExchangedCause(),
    KAndVExchangedCause(),
    QAndVExchangedCause(),
    FusedRowOrderCause(),
    FusedRowNestingCause(),
    FusedRowGroupsCause(),
    HeadsInterleavedCause(),
    HeadsPermutedCause(),
    OutputGroupOrderCause(),
    OutputReshapedCause(),
    MatrixTransposedCause(),
    RotaryPermutationMissingCause(),
    RotaryPermutationDoubledCause(),
    RotaryPermutationHeadsCause(),
    KVHeadsTiledCause(),
    ShardOrderCause(),
    ProjectionSignCause(),
    ProjectionFactorCause(),
    RowsZeroCause(),
    RoundedProjectionsCause(),
    MissingBiasesCause(),
    InitialWeightsCause(),
    ScaleCause(),
    RotaryThetaCause(),
)
