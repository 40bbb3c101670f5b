from patch_trees import aiter_tree, old_aiter_tree, sglang_tree

__all__ = ["aiter_tree", "old_aiter_tree", "sglang_tree"]
