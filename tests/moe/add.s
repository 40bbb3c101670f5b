	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	.text
	.globl add
	.p2align 8
	.type add,@function
add:                                       ; words of a buffer += n, 64 a workgroup
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	s_load_dword s6, s[0:1], 0x8
	s_lshl_b32 s7, s2, 8
	v_lshlrev_b32_e32 v1, 2, v0
	v_add_u32_e32 v1, s7, v1
	s_waitcnt lgkmcnt(0)
	global_load_dword v2, v1, s[4:5]
	s_waitcnt vmcnt(0)
	v_add_u32_e32 v2, s6, v2
	global_store_dword v1, v2, s[4:5]
	s_endpgm
	.rodata
	.p2align 6
	.amdhsa_kernel add
		.amdhsa_kernarg_size 12
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_next_free_vgpr 4
		.amdhsa_next_free_sgpr 8
		.amdhsa_accum_offset 4
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
      - .offset: 0
        .size: 8
        .value_kind: by_value
      - .offset: 8
        .size: 4
        .value_kind: by_value
    .group_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .kernarg_segment_size: 12
    .max_flat_workgroup_size: 256
    .name: add
    .private_segment_fixed_size: 0
    .sgpr_count: 8
    .symbol: add.kd
    .vgpr_count: 4
    .wavefront_size: 64
amdhsa.target: amdgcn-amd-amdhsa--gfx942
amdhsa.version: [1, 2]
...
	.end_amdgpu_metadata
