"""GLM-4.5 and its kin: grouped-query attention that rotates half of a head, DeepSeek-V3's router, shared experts."""
