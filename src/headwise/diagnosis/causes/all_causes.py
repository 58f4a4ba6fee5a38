"""All causes, in the order in which equal ones are named."""

from __future__ import annotations

from headwise.diagnosis.causes.adapters_merged import AdaptersMergedCause
from headwise.diagnosis.causes.batch_and_sequence_exchanged import BatchSequenceExchangedCause
from headwise.diagnosis.causes.causal_alignment import CausalAlignmentCause
from headwise.diagnosis.causes.cause import Cause
from headwise.diagnosis.causes.decoding_left_padding import DecodingLeftPaddingCause
from headwise.diagnosis.causes.decoding_position_offset import DecodingPositionOffsetCause
from headwise.diagnosis.causes.decoding_window import DecodingWindowCause
from headwise.diagnosis.causes.distance_bias_coefficient import DistanceBiasCoefficientCause
from headwise.diagnosis.causes.distance_bias_slope_rule import DistanceBiasSlopeRuleCause
from headwise.diagnosis.causes.dropout_left_on import DropoutLeftOnCause
from headwise.diagnosis.causes.evicted_keys import EvictedKeysCause
from headwise.diagnosis.causes.factor_of_projection import ProjectionFactorCause
from headwise.diagnosis.causes.heads_interleaved import HeadsInterleavedCause
from headwise.diagnosis.causes.heads_permuted import HeadsPermutedCause
from headwise.diagnosis.causes.k_and_v_exchanged import KAndVExchangedCause
from headwise.diagnosis.causes.kv_groups_of_fused_rows import FusedRowGroupsCause
from headwise.diagnosis.causes.kv_heads_tiled import KVHeadsTiledCause
from headwise.diagnosis.causes.layers_exchanged import LayersExchangedCause
from headwise.diagnosis.causes.layers_off_by_one import LayersOffByOneCause
from headwise.diagnosis.causes.mask_added_as_numbers import MaskAddedAsNumbersCause
from headwise.diagnosis.causes.mask_polarity import MaskPolarityCause
from headwise.diagnosis.causes.merge_without_transpose import MergeWithoutTransposeCause
from headwise.diagnosis.causes.missing_biases import MissingBiasesCause
from headwise.diagnosis.causes.nesting_of_fused_rows import FusedRowNestingCause
from headwise.diagnosis.causes.norm_inside import NormInsideCause
from headwise.diagnosis.causes.number_of_heads import NumberOfHeadsCause
from headwise.diagnosis.causes.order_of_fused_rows import FusedRowOrderCause
from headwise.diagnosis.causes.output_heads_in_another_group_order import OutputGroupOrderCause
from headwise.diagnosis.causes.output_projection_reshaped import OutputReshapedCause
from headwise.diagnosis.causes.padding_ignored import PaddingIgnoredCause
from headwise.diagnosis.causes.padding_side import PaddingSideCause
from headwise.diagnosis.causes.projection_module_bypassed import ProjectionModuleBypassedCause
from headwise.diagnosis.causes.projection_rows_zero import ProjectionRowsZeroCause
from headwise.diagnosis.causes.q_and_k_exchanged import QAndKExchangedCause
from headwise.diagnosis.causes.q_and_v_exchanged import QAndVExchangedCause
from headwise.diagnosis.causes.qk_norm_kind import QKNormKindCause
from headwise.diagnosis.causes.qk_norm_place import QKNormPlaceCause
from headwise.diagnosis.causes.qk_norm_weight_offset import QKNormWeightOffsetCause
from headwise.diagnosis.causes.residual_inside import ResidualInsideCause
from headwise.diagnosis.causes.rotary_attention_factor import RotaryAttentionFactorCause
from headwise.diagnosis.causes.rotary_axis import RotaryAxisCause
from headwise.diagnosis.causes.rotary_dtype import RotaryDtypeCause
from headwise.diagnosis.causes.rotary_exponent_width import RotaryExponentWidthCause
from headwise.diagnosis.causes.rotary_missing import RotaryMissingCause
from headwise.diagnosis.causes.rotary_pairing import RotaryPairingCause
from headwise.diagnosis.causes.rotary_partial_width import RotaryPartialWidthCause
from headwise.diagnosis.causes.rotary_permutation_doubled import RotaryPermutationDoubledCause
from headwise.diagnosis.causes.rotary_permutation_missing import RotaryPermutationMissingCause
from headwise.diagnosis.causes.rotary_permutation_of_other_heads import RotaryPermutationHeadsCause
from headwise.diagnosis.causes.rotary_position_offset import RotaryPositionOffsetCause
from headwise.diagnosis.causes.rotary_scaling_factor import RotaryScalingFactorCause
from headwise.diagnosis.causes.rotary_scaling_kind import RotaryScalingKindCause
from headwise.diagnosis.causes.rotary_some_heads import RotarySomeHeadsCause
from headwise.diagnosis.causes.rotary_theta import RotaryThetaCause
from headwise.diagnosis.causes.rotary_whole_head_pairs import RotaryWholeHeadPairsCause
from headwise.diagnosis.causes.rounded_weights import RoundedWeightsCause
from headwise.diagnosis.causes.rows_without_keys import RowsWithoutKeysCause
from headwise.diagnosis.causes.scale import ScaleCause
from headwise.diagnosis.causes.scale_twice import ScaleTwiceCause
from headwise.diagnosis.causes.shards_in_the_wrong_order import ShardOrderCause
from headwise.diagnosis.causes.sign_of_projection import ProjectionSignCause
from headwise.diagnosis.causes.sinks import SinksCause
from headwise.diagnosis.causes.softcap import SoftcapCause
from headwise.diagnosis.causes.softmax_axis import SoftmaxAxisCause
from headwise.diagnosis.causes.softmax_dtype import SoftmaxDtypeCause
from headwise.diagnosis.causes.split_without_transpose import SplitWithoutTransposeCause
from headwise.diagnosis.causes.square_matrix_transposed import MatrixTransposedCause
from headwise.diagnosis.causes.weights_at_initial_values import InitialWeightsCause
from headwise.diagnosis.causes.window_off_by_one import WindowOffByOneCause

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
    ProjectionRowsZeroCause(),
    RoundedWeightsCause(),
    MissingBiasesCause(),
    InitialWeightsCause(),
    ProjectionModuleBypassedCause(),
    AdaptersMergedCause(),
    ScaleCause(),
    RotaryThetaCause(),
    RotaryPairingCause(),
    RotaryPartialWidthCause(),
    RotaryDtypeCause(),
    RotaryExponentWidthCause(),
    RotaryAttentionFactorCause(),
    RotaryMissingCause(),
    RotaryWholeHeadPairsCause(),
    RotaryPositionOffsetCause(),
    RotaryAxisCause(),
    RotarySomeHeadsCause(),
    RotaryScalingFactorCause(),
    RotaryScalingKindCause(),
    QKNormKindCause(),
    QKNormPlaceCause(),
    QKNormWeightOffsetCause(),
    DistanceBiasCoefficientCause(),
    DistanceBiasSlopeRuleCause(),
    ScaleTwiceCause(),
    SoftcapCause(),
    SinksCause(),
    MaskPolarityCause(),
    PaddingSideCause(),
    PaddingIgnoredCause(),
    MaskAddedAsNumbersCause(),
    CausalAlignmentCause(),
    WindowOffByOneCause(),
    RowsWithoutKeysCause(),
    SoftmaxAxisCause(),
    BatchSequenceExchangedCause(),
    SoftmaxDtypeCause(),
    NumberOfHeadsCause(),
    SplitWithoutTransposeCause(),
    MergeWithoutTransposeCause(),
    DropoutLeftOnCause(),
    ResidualInsideCause(),
    NormInsideCause(),
    DecodingPositionOffsetCause(),
    DecodingLeftPaddingCause(),
    DecodingWindowCause(),
    EvictedKeysCause(),
    LayersExchangedCause(),
    LayersOffByOneCause(),
)
