const items = [...document.querySelectorAll('.item')], choice = document.querySelector('#choice');
const position = document.querySelector('#position'), back = document.querySelector('#back');
const next = document.querySelector('#next');
let shown = items, at = 0;
function show() {
  items.forEach(item => { item.hidden = item !== shown[at]; });
  position.textContent = shown.length ? `${at + 1} of ${shown.length}` : 'none';
  back.disabled = at <= 0; next.disabled = at >= shown.length - 1;
}
function choose() {
  shown = items.filter(item => !choice.value || item.dataset.labels.split(' ').includes(choice.value)); at = 0; show();
}
function move(step) { if (shown[at + step]) { at += step; show(); } }
if (items.length) {
  document.querySelector('.controls').hidden = false;
  back.onclick = () => move(-1); next.onclick = () => move(1); choice.onchange = choose;
  document.addEventListener('keydown', event => {
    if (event.target === choice || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === 'ArrowLeft') move(-1); else if (event.key === 'ArrowRight') move(1);
  });
  show();
}
