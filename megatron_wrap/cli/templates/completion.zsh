_megatron_wrap() {
    local -a candidates
    candidates=("${(@f)$(megatron-wrap completion zsh --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    compadd -Q -S '' -- ${(M)candidates:#*[=./]}
    compadd -Q -- ${candidates:#(|*[=./])}
}
compdef _megatron_wrap megatron-wrap
