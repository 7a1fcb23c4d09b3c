"""Multi-token prediction modules (DeepSeek-V3, section 2.2), as the families store them beside their models."""
