from patch_trees import aiter_tree, old_aiter_tree, three_files

__all__ = ["aiter_tree", "old_aiter_tree", "three_files"]
