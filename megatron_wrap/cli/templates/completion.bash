_megatron_wrap() {
    local IFS=$'\n'
    COMPREPLY=($(megatron-wrap completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
    return 0
}
complete -F _megatron_wrap megatron-wrap
