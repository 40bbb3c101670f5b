	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	.text
	.globl	first                           ; -- Begin function first
	.type	first,@function
first:                                  ; @first
.Lfunc_begin0:
	.file	1 "." "k.py"
	.loc	1 5 0
	s_load_dwordx2 s[8:9], s[0:1], 0x0       ; preload
	s_waitcnt lgkmcnt(0)
	s_branch .LBB0_0
	.p2align	8
; %bb.1:
.LBB0_0:
	s_load_dwordx4 s[12:15], s[0:1], 0x8  // scale, half, blocks
	v_and_b32_e32 v1, 0x3ff, v0
	v_bfe_u32 v2, v0, 10, 10
	v_lshl_add_u32 v3, v2, 5, v1
	s_waitcnt lgkmcnt(0)
	s_mul_i32 s11, s11, s14                  ; workgroup y times the number of blocks in x
	s_add_i32 s11, s11, s10
	s_lshl_b32 s11, s11, 8
	v_lshl_add_u32 v3, v3, 2, s11
	v_mov_b32_e32 v4, s13
	v_add_f32_e32 v4, s12, v4
	global_store_dword v3, v4, s[8:9]
	s_endpgm
	.section	.rodata,"a",@progbits
	.p2align	6, 0x0
	.amdhsa_kernel first
		.amdhsa_group_segment_fixed_size 1024
		.amdhsa_kernarg_size 64
		.amdhsa_user_sgpr_count 10
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_user_sgpr_kernarg_preload_length 8
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_system_sgpr_workgroup_id_y 1
		.amdhsa_system_vgpr_workitem_id 1
		.amdhsa_next_free_vgpr 12
		.amdhsa_next_free_sgpr 17
		.amdhsa_accum_offset 8
	.end_amdhsa_kernel
	.text
.Lfunc_end0:
	.size	first, .Lfunc_end0-first
second:
	s_endpgm
	.amdhsa_kernel second
		.amdhsa_next_free_vgpr 8
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     4
    .args:
      - .address_space:  global
        .name:           out
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .name:           scale
        .offset:         8
        .size:           4
        .value_kind:     by_value
      - .name:           half
        .offset:         12
        .size:           4
        .value_kind:     by_value
      - .name:           blocks
        .offset:         16
        .size:           4
        .value_kind:     by_value
    .group_segment_fixed_size: 1024
    .name:           first
    .reqd_workgroup_size:
      - 32
      - 2
      - 1
    .sgpr_count:     17
    .vgpr_spill_count: 3
    .wavefront_size: 64
  - .args:           []
    .name:           second
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
amdhsa.version:
  - 1
  - 2
...
	.end_amdgpu_metadata
