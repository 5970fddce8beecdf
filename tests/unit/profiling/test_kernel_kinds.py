"""Kinds of kernels and operations by the names that libraries give them."""

import re
from pathlib import Path

import pytest

from megatron_wrap.profiling import kernel_kinds as kinds

# names of steps of a Llama in bf16: with Transformer Engine, with torch's layers, with Megatron-Core's own attention,
# and of NCCL; template arguments are shortened
TRANSFORMER_ENGINE = {
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN": kinds.MATMUL,
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTN": kinds.MATMUL,
    "nvjet_qqtst_128x256_128x4_2x1_v_bz_TNT": kinds.MATMUL,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute": kinds.MATMUL,
    "nvjet_hss_64x8_64x16_1x1_v_bz_splitK_NNT": kinds.MATMUL,
    "matmul_kernel_tma_persistent": kinds.MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>": kinds.MATMUL,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0": kinds.ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_128x64x128_1x1x1_kernel0_0": kinds.ATTENTION,
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<transformer_engine::Kernel_traits<...>>": (
        kinds.ELEMENTWISE
    ),
    "void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>(__nv_bfloat16 const*, int const*)": (
        kinds.ELEMENTWISE
    ),
    "void transformer_engine::gated_act_kernel<Empty, &transformer_engine::silu>": kinds.ELEMENTWISE,
    "void transformer_engine::detail::cast_transpose_fusion_kernel<...>": kinds.ELEMENTWISE,
    "void transformer_engine::multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctorMaster>": kinds.OPTIMIZER,
    "void transformer_engine::multi_tensor_apply_kernel<TensorListMetadata<1>, L2NormFunctor<float>>": kinds.OPTIMIZER,
    "cross_entropy_kernel": kinds.LOSS,
    "online_softmax_kernel": kinds.LOSS,
}
TORCH = {
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(Params)": kinds.MATMUL,
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn": kinds.MATMUL,
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>": (
        kinds.MATMUL
    ),
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>, false, true>": (
        kinds.ATTENTION
    ),
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": kinds.ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)": kinds.ATTENTION,
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>(Params)": kinds.ATTENTION,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>": kinds.ELEMENTWISE,
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>": kinds.ELEMENTWISE,
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>": kinds.COPIES,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<...>": kinds.COPIES,
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>": (
        kinds.COPIES
    ),
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, Fused"
    "AdamMathFunctor<float, 4>>": kinds.OPTIMIZER,
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, c10::BFloat16>": (
        kinds.ATTENTION
    ),
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>": kinds.ATTENTION,
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, true, true>": kinds.LOSS,
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>": kinds.LOSS,
    "void scaled_upper_triang_masked_softmax_warp_forward<__nv_bfloat16, __nv_bfloat16, float, 12>": kinds.ATTENTION,
    "triton_poi_fused_mul_silu_0": kinds.ELEMENTWISE,
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": kinds.ATTENTION,
    "chunk_bwd_kernel_dqkwg": kinds.ATTENTION,
    "layer_norm_gated_fwd_kernel": kinds.ELEMENTWISE,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1": kinds.COPIES,
    "_log_normalizer_kernel": kinds.LOSS,
    "_expert_products_kernel": kinds.MATMUL,
    "_weight_gradients_by_pointers_kernel": kinds.MATMUL,
    "_square_sums_kernel": kinds.OPTIMIZER,
    "_short_convolution_copy_kernel": kinds.ATTENTION,
    "_split_rotary_kernel": kinds.ELEMENTWISE,
    "_latent_rotary_kernel": kinds.ELEMENTWISE,
    "_normalized_rotary_backward_kernel": kinds.ELEMENTWISE,
    "Memcpy DtoD (Device -> Device)": kinds.COPIES,
    "Memset (Device)": kinds.COPIES,
}
COMMUNICATION = {
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce-scatter",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all-gather",
    "ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgsStorage<4096ul>)": "all-reduce",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send and receive",
    "gloo:all_reduce": "all-reduce",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::alltoall_base_": "all-to-all",
    "gloo:send": "send and receive",
    "c10d::broadcast_": "broadcast",
    "c10d::barrier": "other",
}


@pytest.mark.parametrize(("name", "kind"), [*TRANSFORMER_ENGINE.items(), *TORCH.items()])
def test_kernels(name: str, kind: str) -> None:
    assert kinds.kernel_kind(name) == kind


@pytest.mark.parametrize(("name", "collective"), COMMUNICATION.items())
def test_communication(name: str, collective: str) -> None:
    kind = kinds.kernel_kind(name) if name.startswith("nccl") else kinds.operation_kind(name)
    assert (kind, kinds.collective(name)) == (kinds.COMMUNICATION, collective)


def test_the_kernels_of_this_package_are_known() -> None:
    folder = Path(kinds.__file__).parents[1]
    names = [
        name
        for path in folder.rglob("*.py")
        for name in re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", path.read_text())
    ]
    assert len(names) > 20
    assert len(set(names)) == len(names)  # a profile names a kernel, not its file
    assert not [name for name in names if kinds.kernel_kind(name) is None]


def test_an_unknown_kernel_has_no_kind() -> None:
    assert kinds.kernel_kind("my_kernel") is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", kinds.MATMUL),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", kinds.ATTENTION),
        ("aten::mul", kinds.ELEMENTWISE),
        ("aten::mean", kinds.ELEMENTWISE),
        ("aten::_to_copy", kinds.COPIES),
        ("aten::_log_softmax", kinds.LOSS),
    ],
)
def test_operations_of_a_cpu(name: str, kind: str) -> None:
    assert kinds.operation_kind(name) == kind


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy"
            "_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const>(int)::{lambda(int)#1}>(int)",
            "elementwise_kernel",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 3>(char*)", "CatArrayBatchedCopy"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_gemm_align8>(Params)", "cutlass_80_tensorop_gemm_align8"),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<A<1>, B> > >(Params)",
            "FlashAttnFwdSm90",
        ),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        ("<lambda>", "<lambda>"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert kinds.short_name(name) == short
