"""Families and short names of kernels as they are called on Hopper, by Triton and by ROCm."""

import pytest

from tests.kineto import ADD, GEMM
from workbench.kernels import FAMILIES, RULES, family, rule_of, short_name

NAMES = {
    GEMM: ("gemm", "device_kernel[GemmUniversal]"),
    ADD: ("glue", "vectorized_elementwise_kernel[CUDAFunctor_add]"),
    "nvjet_tst_128x64_64x8_1x2_h_bz_bias_TNN": ("gemm", "nvjet_tst_128x64_64x8_1x2_h_bz_bias_TNN"),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas":
        ("gemm", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_w…"),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, true>(cublasLt::Params)":
        ("gemm", "splitKreduce_kernel"),
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop"
    "FwdSm90<2, cute::tuple<cute::C<1>>>>>>(flash::Params)": ("attention", "device_kernel[FlashAttnFwdSm90]"),
    "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int, int const*)":
        ("attention", "prepare_varlen_num_blocks_kernel"),
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>(pytorch_flash::Params)":
        ("attention", "flash_fwd_kernel"),
    "kernel_unified_attention_2d": ("attention", "kernel_unified_attention_2d"),
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float)":
        ("norm", "vectorized_layer_norm_kernel"),
    "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)":
        ("norm", "fused_add_rms_norm_kernel"),
    "triton_red_fused_add_native_layer_norm_3": ("norm", "triton_red_fused_add_native_layer_norm_3"),
    "triton_poi_fused_cat_mul_2": ("glue", "triton_poi_fused_cat_mul_2"),
    "triton_tem_fused_addmm_1": ("gemm", "triton_tem_fused_addmm_1"),
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<at::native::(anonymous namespace)"
    "::OpaqueType<2u>, unsigned int, 2, 128, 1, 16>(int)": ("glue", "CatArrayBatchedCopy_alignedK_contig"),
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}>>(int)":
        ("glue", "elementwise_kernel[direct_copy_kernel_cuda]"),
    "void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::Policy, int const*>(int const*)":
        ("glue", "DeviceScanKernel"),
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<int, at::native::MaxOps<int>, unsigned int>>(int)":
        ("glue", "reduce_kernel[MaxOps]"),
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)": ("glue", "rotary_embedding_kernel"),
    "Memcpy HtoD (Pageable -> Device)": ("memcpy", "Memcpy HtoD (Pageable -> Device)"),
    "CopyDeviceToHost": ("memcpy", "CopyDeviceToHost"),
    "Memset (Device)": ("memset", "Memset (Device)"),
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)":
        ("collective", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
    "Cijk_Ailk_Bljk_BBS_BH_MT64x64x64_MI16x16x16x1_SN": ("gemm", "Cijk_Ailk_Bljk_BBS_BH_MT64x64x64_MI16x16x16x1_SN"),
    # Those of variant fused.
    "_multiply": ("gemm", "_multiply"),
    "_attend": ("attention", "_attend"),
    "_add_norm": ("norm", "_add_norm"),
    "_rotate": ("glue", "_rotate"),
    "_quick_gelu": ("glue", "_quick_gelu"),
    "spin_kernel": ("other", "spin_kernel"),
    "": ("other", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_family_and_short_name(name: str) -> None:
    assert (family(name), short_name(name)) == NAMES[name]


def test_every_rule_is_used_and_says_why() -> None:
    assert {rule_of(name) for name in NAMES} - {None} == set(RULES)
    assert all(rule.reason and rule.family in FAMILIES for rule in RULES)


@pytest.mark.parametrize("name", ["<" * 50_000, "(" * 50_000, "a::" * 50_000, "x" * 10**6, "void ", "<>", "::"])
def test_hostile_names_are_short_and_quick(name: str) -> None:
    assert len(short_name(name)) <= 60
    assert family(name) in FAMILIES
