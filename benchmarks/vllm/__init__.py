"""What stock vLLM is compared with the plug-in in besides `kedge bench vllm`'s own cases."""
