	v_mov_b32_e32 v40, 0
	buffer_load_dwordx4 v[4:7], v1, s[12:15], 0 offen
.Lloop:
	buffer_load_dwordx4 v[20:23], v1, s[8:11], 0 offen
	s_waitcnt vmcnt(1)
	v_and_b32_e32 v8, 0xf0f0f0f0, v4
	v_lshlrev_b32_e32 v9, 4, v4
	v_and_b32_e32 v9, 0xf0f0f0f0, v9
	v_and_b32_e32 v10, 0xf0f0f0f0, v5
	v_lshlrev_b32_e32 v11, 4, v5
	v_and_b32_e32 v11, 0xf0f0f0f0, v11
	v_mul_lo_u32 v40, v40, v40
	v_mfma_i32_16x16x32_i8 v[32:35], v[8:9], v[16:17], v[32:35]
	v_mfma_i32_16x16x32_i8 v[32:35], v[10:11], v[18:19], v[32:35]
	buffer_load_dwordx4 v[4:7], v1, s[12:15], 0 offen offset:16
	s_waitcnt vmcnt(1)
	ds_write_b128 v1, v[20:23]
	s_waitcnt lgkmcnt(0)
	s_barrier
	ds_read_b128 v[16:19], v1
	s_cmp_lt_u32 s2, s3
	s_cbranch_scc1 .Lloop
	v_exp_f32_e32 v41, v40
	v_cvt_f32_i32_e32 v41, v40
	v_mfma_i32_16x16x32_i8 v[32:35], v[10:11], v[18:19], v[32:35]