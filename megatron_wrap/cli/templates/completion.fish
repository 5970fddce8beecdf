complete -c megatron-wrap -f -a '(megatron-wrap completion fish --line (commandline -cp | string collect) 2>/dev/null)'
