"""The engines that generate tokens: torch, vLLM, and a scripted one."""
